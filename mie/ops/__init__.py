"""Between the model and its arithmetic: ``reference`` is the oracle, ``dispatch`` the seam."""
