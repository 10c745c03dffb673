//! Access control: by API key, by requested host, and by the web page that sends the request.

pub(crate) mod cors;
pub(crate) mod keys;
pub(crate) mod origin;

pub(crate) use self::cors::CorsConfig;
pub(crate) use self::keys::{ApiKeys, ClientAccess, ConcurrencyPass, KeyCounts, KeyHash};
