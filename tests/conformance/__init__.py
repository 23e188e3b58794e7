"""PyTorch's own tests of torch.distributed, run against this backend: `python -m tests.conformance --help`."""
