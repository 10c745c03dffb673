//! What a policy would do to a backend, before it does it to a real one.
