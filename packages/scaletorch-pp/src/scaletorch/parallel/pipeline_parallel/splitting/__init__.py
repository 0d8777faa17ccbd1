"""The places where a plain module is cut, and the modules of each stage."""
