//! Who may send a request: by its key, by the host that it names, by the page that it comes from.

pub(crate) mod cors;
pub(crate) mod csrf;
pub(crate) mod host_check;
pub(crate) mod keys;
