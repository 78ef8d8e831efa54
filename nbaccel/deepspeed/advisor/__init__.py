"""Which DeepSpeed configuration fits: the published ladder, walked by estimate."""
