"""One launch: `notebook_launcher`, from a plan to results."""
