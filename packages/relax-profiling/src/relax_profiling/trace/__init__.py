"""Reads traces in the Chrome format of torch.profiler, also damaged ones, without holding a whole trace in memory."""
