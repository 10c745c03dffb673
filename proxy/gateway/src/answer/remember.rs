//! Keeps a generating request and its answer until the answer is complete, so that the supervisor can give
//! the conversation to the next process. The bytes count in the budget for request bodies, and are dropped
//! when other requests need the room.

use warden_supervisor::{AnswerText, ConversationTurn, ExchangeOutcome};

use crate::answer::{AnswerMeter, AnswerTranscript};
use crate::backend::{BackendLease, UpstreamRequest};
use crate::body::HeldPieces;

pub(crate) struct TurnRecorder {
    path: String,
    /// Body as the backend got it; `None` if it cannot be kept.
    body: Option<HeldPieces>,
    has_media: bool,
    /// Non-streaming answer so far; `None` if it exceeds `limit`.
    answer: Option<Vec<u8>>,
    limit: usize,
}

impl TurnRecorder {
    /// Starts a record of at most `limit` answer bytes. `understood`: the supervisor can use the body.
    pub(crate) fn from_request(
        message: &UpstreamRequest,
        path: &str,
        understood: bool,
        limit: usize,
    ) -> Self {
        let (images, audio) = message.media();
        let has_media = images + audio > 0;
        let body = match message.held_body() {
            Some(intake) if understood && !has_media && intake.may_be_held() => intake.held_copy(),
            _ => None,
        };
        Self { path: path.to_owned(), body, has_media, answer: Some(Vec::new()), limit }
    }

    pub(super) fn add_piece(&mut self, piece: &[u8]) {
        let Some(said) = self.answer.as_mut().filter(|_| self.body.is_some()) else { return };
        if said.len() + piece.len() > self.limit {
            self.answer = None;
        } else {
            said.extend_from_slice(piece);
        }
    }

    /// Gives the complete exchange to the lease. `heard` is the text of a streamed answer, if known.
    pub(super) fn note_turn(
        self,
        lease: &dyn BackendLease,
        meter: &AnswerMeter,
        ended: &ExchangeOutcome,
        heard: Option<&AnswerTranscript>,
    ) {
        let Some(prompt) = ended.prompt else { return };
        let said = match (heard.and_then(AnswerTranscript::whole_content), self.answer) {
            (Some(text), _) => AnswerText::Text(text.to_owned()),
            (None, Some(said)) if heard.is_none() && !said.is_empty() => AnswerText::Whole(said.into()),
            _ => AnswerText::Nothing,
        };
        let body = self.body.map(|held| held.joined());
        lease.note_turn(ConversationTurn {
            path: self.path,
            body,
            said,
            prompt,
            tokens: prompt + meter.work(None).output_tokens,
            has_media: self.has_media,
            prefill: ended.prefill,
        });
    }
}
