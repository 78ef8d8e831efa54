"""What a launch, or a cell of live workers, shows of itself while it runs."""
