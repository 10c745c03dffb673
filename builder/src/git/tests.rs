//! Repositories made by hand.
