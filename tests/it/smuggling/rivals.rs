//! The same corpus through nginx and haproxy: whatever they refuse, we refuse, or the corpus says why not.
