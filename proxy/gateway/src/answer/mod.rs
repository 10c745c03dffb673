//! The response path: relays whole events, counts work, assembles answers from streams, and keeps the record
//! of the request.

pub(crate) mod answer_body;
pub(crate) mod assemble;
pub(crate) mod continuation;
pub(crate) mod flight;
pub(crate) mod interim;
mod life_sign;
pub(crate) mod meter;
pub(crate) mod relay;
pub(crate) mod remember;
mod resuming;
pub(crate) mod teller;
mod unread;
