//! The response path: relays whole events, counts work, and keeps the request's record.

pub(crate) mod answer_body;
pub(crate) mod continuation;
pub(crate) mod flight;
pub(crate) mod format;
pub(crate) mod loading;
pub(crate) mod meter;
mod name_finder;
pub(crate) mod relay;
pub(crate) mod remember;
mod text_tail;
mod vector_scan;

pub(crate) use self::answer_body::AnswerBody;
use self::answer_body::{PolledFrame, frame};
use self::continuation::{AnswerStage, AnswerTranscript, DONE, EventTranslator, RepeatTranslator, StreamCut};
pub(crate) use self::flight::InFlightRequest;
pub(crate) use self::format::AnswerFormat;
use self::loading::keep_alive;
pub(crate) use self::loading::{InterimBody, LoadingNoticeForm, LoadingNotifier};
use self::meter::AnswerMeter;
pub(crate) use self::meter::WatchedContent;
pub(crate) use self::relay::{AnswerRelay, ContinuationTerms, EventTerms, RelayTerms};
pub(crate) use self::remember::TurnRecorder;
