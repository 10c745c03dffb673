//! Placeholder: replaced in the next commits.
