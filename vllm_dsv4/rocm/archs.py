"""The AMD architectures that kernels are compiled for."""

LDS_BYTES_PER_CU = {"gfx942": 64 * 1024, "gfx950": 160 * 1024, "gfx1250": 320 * 1024}

ARCHS = tuple(LDS_BYTES_PER_CU)
