"""The names of torch.distributed.pipelining over pipeloom's engine, module for module."""
