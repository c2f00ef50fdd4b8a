"""An engine that says what a file tells it to: the real front door, thread and batch over a stepper without a model."""
