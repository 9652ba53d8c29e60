"""Pictures of a Timeline: one model, many renderers, none of which needs torch."""
