//! The response path: relays whole events, counts work, assembles answers, and keeps the request's record.

pub(crate) mod answer_body;
pub(crate) mod assemble;
pub(crate) mod continuation;
pub(crate) mod flight;
pub(crate) mod loading;
pub(crate) mod meter;
pub(crate) mod relay;
pub(crate) mod remember;

pub(crate) use self::answer_body::AnswerBody;
use self::answer_body::{PolledFrame, frame};
pub(crate) use self::assemble::AnswerFormat;
use self::assemble::is_events;
use self::continuation::{AnswerStage, AnswerTranscript, DONE, EventTranslator, RepeatTranslator, StreamCut};
pub(crate) use self::flight::InFlightRequest;
use self::loading::keep_alive;
pub(crate) use self::loading::{InterimBody, LoadingNoticeForm, LoadingNotifier};
use self::meter::AnswerMeter;
pub(crate) use self::relay::{AnswerRelay, ContinuationTerms, EventTerms, RelayTerms};
pub(crate) use self::remember::TurnRecorder;
