"""What being durable costs a generation."""
