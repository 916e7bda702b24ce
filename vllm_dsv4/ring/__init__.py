"""Per-sequence rings: sizes, addresses, the slot pool, the vLLM spec and manager, the buffers.

Read in this order: ``geometry`` (how large), ``addressing`` (which row), ``slots`` (who owns a
slot), ``spec`` and ``manager`` (how vLLM sees it), ``arena`` (the memory), ``step`` (what one
forward pass needs).  A slot cannot reach vLLM's paged pool because ``manager.RingManager`` never
calls that pool: it lends from ``slots.SlotPool`` and returns an empty list wherever vLLM asks for
blocks to free.

Nothing here knows a platform, a command or a metric: it imports ``log`` and ``settings`` only.
"""
