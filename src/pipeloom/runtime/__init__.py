"""Running a schedule: one executor, local ranks or torch.distributed, gradients by contract."""
