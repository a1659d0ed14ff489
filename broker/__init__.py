"""The broker connects clients and workers. It admits and routes requests, and bounds all queues."""
