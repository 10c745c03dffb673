//! Access control: by key, by requested host, by the page's origin.

pub(crate) mod cors;
pub(crate) mod csrf;
pub(crate) mod host_check;
pub(crate) mod keys;
