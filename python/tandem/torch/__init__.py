"""PyTorch's tensors: autograd, the operators of torch.ops.tandem, and torch.compile."""
