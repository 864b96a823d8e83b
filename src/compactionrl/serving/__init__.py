"""A small server: the local sampler behind vLLM's token route and OpenAI's chat route."""
