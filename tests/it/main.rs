//! The one integration test binary. One module per promise; a test's name is the promise's sentence.

mod fake;
mod layout;
