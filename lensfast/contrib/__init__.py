"""Trace context through other libraries: FastAPI, aiohttp, Ray and NCCL. Each module is imported by itself."""
