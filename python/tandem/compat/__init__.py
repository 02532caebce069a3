"""What tandem.flash_attn, flash_attn2, flash_mla and vllm_flash_attn share, and PyTorch's own attention."""
