"""Our caches inside of other libraries: handed to their own ``generate``, in place of theirs."""
