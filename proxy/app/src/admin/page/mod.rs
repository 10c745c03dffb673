//! The page: each view is a pure function from what is known to the content of `<main>`.

pub(crate) mod requests;
