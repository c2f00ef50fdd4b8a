"""The engine as a running thing: its thread, scheduler, delivery, and the front door that services call."""
