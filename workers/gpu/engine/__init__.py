"""The engine of one model: scheduler, block manager, sequences, and the step."""
