"""The GPU worker: model loading, paged KV cache, scheduler, sampler, and the step loop."""
