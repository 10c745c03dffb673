//! Request bodies: read as far as needed, scanned and edited in transit, held under one budget.

pub(crate) mod budget;
pub(crate) mod fingerprint;
pub(crate) mod intake;
pub(crate) mod json_index;
pub(crate) mod limits;
pub(crate) mod multipart;
pub(crate) mod request_stream;
pub(crate) mod scan;
pub(crate) mod sent;
pub(crate) mod spelling;
pub(crate) mod splice;
pub(crate) mod texts;

pub(crate) use self::budget::{BodyBudget, ClientPeer, ClientShare, HeldPieces, add_within_limit};
pub(crate) use self::fingerprint::FingerprintKey;
use self::fingerprint::{FingerprintHasher, cache_sized_parts};
pub(crate) use self::intake::{BodyIntake, BodyModel};
pub(crate) use self::json_index::{ContentKind, JsonIndex, JsonKind, JsonList, JsonMember, JsonPlace};
pub(crate) use self::limits::BodyLimits;
use self::multipart::MultipartScanner;
pub(crate) use self::request_stream::RequestStream;
use self::scan::{BodyScanner, ScannedModel};
pub(crate) use self::sent::SentBody;
pub(crate) use self::spelling::StringSpelling;
pub(crate) use self::splice::{ByteEdit, removal_ranges};
pub(crate) use self::texts::{MAX_TEXT_BYTES, PromptTexts};
