"""Number formats: float32, bf16, fp16, FP8."""
