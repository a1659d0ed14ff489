"""The broker between clients and workers: admits and routes requests, and bounds all queues."""
