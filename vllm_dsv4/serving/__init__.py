"""What both platforms share, and what guards them before anything is allocated.

``platform`` is where vLLM's configuration is judged, by ``refusals`` and ``ray_cluster``; ``ranks``
checks every process that the configuration reaches; ``ring_manager``, ``board`` and ``metrics``
carry the counts to ``/metrics``. May import ``checkpoint``, ``ring`` and the ground floor.
"""
