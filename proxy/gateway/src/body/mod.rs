//! Request bodies: read as far as needed, scanned while they are passed on, edited in place, held under one
//! budget.

pub(crate) mod body_rate;
pub(crate) mod budget;
pub(crate) mod fingerprint;
pub(crate) mod gist;
pub(crate) mod intake;
pub(crate) mod json_index;
pub(crate) mod limits;
pub(crate) mod multipart;
pub(crate) mod request_copy;
pub(crate) mod request_stream;
pub(crate) mod scan;
pub(crate) mod sent;
pub(crate) mod spelling;
pub(crate) mod splice;
pub(crate) mod texts;
