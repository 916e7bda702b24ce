"""What this plugin uses of vLLM, and whether another vLLM still has it: read from source alone.

Read in this order: ``source`` (a package as syntax trees), ``classes`` (members and bases),
``types`` (what an expression is), ``shapes`` (how a call or a function looks), ``uses`` (what our
code uses), ``alternatives`` (where it looks in several places), ``own`` (what our subclasses add),
``faces`` (what a part of vLLM looks like from outside), ``record`` (all of these, kept in a file),
``check`` (the record against another vLLM), ``report`` and ``document`` (how both are told).
"""
