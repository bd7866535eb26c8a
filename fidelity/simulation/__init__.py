"""A decode without data: what operators, kernels, weights and an allocator would hold, booked on shapes alone."""
