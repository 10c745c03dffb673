//! Access control: by API key, by requested host, and by the web page that sends the request.

pub(crate) mod cors;
pub(crate) mod csrf;
pub(crate) mod host_check;
pub(crate) mod keys;
