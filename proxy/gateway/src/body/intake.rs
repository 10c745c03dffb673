//! Reads as much of a request body as is needed before a backend is chosen. Small bodies are read completely:
//! llama-server starts only with the whole body, and a held body can be sent again. Large bodies are read
//! until their model is known. If the request needs a slot, a large body is read to its end while the budget
//! has room: a slot must not wait for a client.
//!
//! ```text
//!   head -> [ large, and its model is in the query or any name will do? ] --yes--> streamed from the start
//!                  | no
//!                  v
//!           pieces are held and scanned -- body complete, or model known and body large --> the rest is streamed
//!                  | limit, silence, no budget                        (or read and held, if it needs a slot)
//!                  v
//!               refused
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout};
use warden_policies::defaults::Server;
use warden_policies::quarantine::RequestFingerprint;

use crate::body::{
    BodyBudget, BodyLimits, BodyScanner, ByteEdit, FingerprintHasher, HeldPieces, MultipartScanner,
    PromptTexts, RequestStream, ScannedModel, SentBody, cache_sized_parts,
};
use crate::config::GatewayConfig;
use crate::refusal::{BodyError, RequestRefusal};

pub(crate) struct BodyIntake {
    pub(crate) held: HeldPieces,
    pub(crate) rest: Option<RequestStream>,
    finder: ModelFinder,
    pub(crate) limits: BodyLimits,
    /// The model name was replaced. A second name fails the request, because the backend would use it.
    one_model: bool,
    pub(crate) sent: Arc<SentBody>,
    pub(crate) printer: FingerprintHasher,
}

enum ModelFinder {
    Json(BodyScanner),
    Form(MultipartScanner),
    /// A form whose rest is passed on unread.
    PassedForm,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BodyModel {
    Model(String),
    /// The body is empty or valid, and names no model.
    Nothing,
    NotJson,
    NotText,
}

impl BodyIntake {
    /// Prepares a body; fails if it declares too many bytes. Reads nothing: a client that waits for `100
    /// Continue` must send nothing before this check. Boxed, because each move would copy the value.
    pub(crate) fn begin(
        headers: &mut HeaderMap,
        body: Incoming,
        budget: BodyBudget,
        limits: BodyLimits,
        printer: FingerprintHasher,
    ) -> Result<Box<Self>, RequestRefusal> {
        if body.size_hint().lower() > limits.bytes {
            return Err(limits.refusal(BodyError::TooLarge));
        }
        let body = RequestStream::open(headers, body, &budget)?;
        let form = headers
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .and_then(MultipartScanner::from_content_type);
        let intake = Self {
            held: HeldPieces::new(budget),
            rest: (!body.is_end_stream()).then_some(body),
            finder: form.map_or_else(|| ModelFinder::Json(BodyScanner::default()), ModelFinder::Form),
            limits,
            one_model: false,
            sent: Arc::default(),
            printer,
        };
        if intake.rest.is_none() {
            intake.sent.note_arrival();
        }
        Ok(Box::new(intake))
    }

    /// Reads what is needed before a backend is chosen. With `search`, reads until the model is known.
    pub(crate) async fn take_needed(
        &mut self,
        search: bool,
        config: &GatewayConfig,
    ) -> Result<(), RequestRefusal> {
        let small = config.upstream.replay_bytes.0;
        let declared = self.rest.as_ref().and_then(|rest| rest.size_hint().exact());
        let may_be_small = declared.is_none_or(|declared| declared <= small);
        loop {
            let searching = search && !self.is_model_settled();
            if self.rest.is_none() || !(searching || (may_be_small && self.held.len() < small)) {
                return Ok(());
            }
            if searching && self.held.len() >= config.server.model_scan_bytes.0 {
                let limit = config.server.model_scan_bytes.in_memory();
                return Err(RequestRefusal::ModelTooFar { limit });
            }
            let Some(piece) = self.next_in_time().await? else { return Ok(()) };
            if let Err(piece) = self.held.push(piece) {
                if searching && !self.is_model_settled() {
                    return Err(RequestRefusal::Busy);
                }
                self.held.push_unreserved(piece);
                return Ok(());
            }
        }
    }

    /// Reads the rest before a slot is requested: llama-server computes nothing before the last byte. Stops
    /// when half of the budget is used. The rest is then sent as it arrives, under the limits of
    /// [`Self::tighten_limits`].
    pub(crate) async fn take_rest(&mut self) -> Result<(), RequestRefusal> {
        while self.rest.is_some() {
            let Some(piece) = self.next_in_time().await? else { break };
            if let Err(piece) = self.held.push_ahead(piece) {
                self.held.push_unreserved(piece);
                break;
            }
        }
        Ok(())
    }

    /// Tightens the limits for the rest of the body, because a slot waits for it.
    pub(crate) fn tighten_limits(&mut self, config: &Server) {
        if self.rest.is_some() {
            self.limits = self.limits.while_in_slot(config);
        }
    }

    /// Reads on while the request waits for a backend: a client's disconnect is noticed only after all its
    /// bytes were read. Resolves only if the body fails. Stops at half of the budget, so that new requests
    /// have room.
    pub(crate) async fn read_ahead(&mut self) -> RequestRefusal {
        while self.rest.is_some() {
            match self.next().await {
                Err(fault) => return self.limits.refusal(fault),
                Ok(None) => break,
                Ok(Some(piece)) => {
                    if let Err(piece) = self.held.push_ahead(piece) {
                        self.held.push_unreserved(piece);
                        break;
                    }
                }
            }
        }
        std::future::pending().await
    }

    /// Reads the whole body while the budget has room. Returns whether the whole body has arrived.
    pub(crate) async fn take_all(&mut self) -> Result<bool, RequestRefusal> {
        while self.rest.is_some() {
            let Some(piece) = self.next_in_time().await? else { break };
            if let Err(piece) = self.held.push(piece) {
                self.held.push_unreserved(piece);
                return Ok(self.rest.is_none());
            }
        }
        Ok(true)
    }

    /// Reads the whole body and drops it, so that the backend gets an empty one.
    pub(crate) async fn discard(&mut self) -> Result<(), RequestRefusal> {
        self.held = self.held.new_empty();
        while self.next_in_time().await?.is_some() {}
        // The scan result belongs to the dropped body.
        self.finder = ModelFinder::Json(BodyScanner::default());
        Ok(())
    }

    async fn next_in_time(&mut self) -> Result<Option<Bytes>, RequestRefusal> {
        let since = Instant::now();
        let piece = timeout(self.limits.rate.left(), self.next()).await;
        let piece = piece.map_err(|_| RequestRefusal::BodyTooSlow)?;
        let piece = piece.map_err(|fault| self.limits.refusal(fault))?;
        self.limits.rate.note_piece(since.elapsed(), piece.as_ref().map_or(0, Bytes::len));
        Ok(piece)
    }

    /// Returns whether the body's length is known: it was declared, or the body was read to its end.
    pub(crate) fn is_measured(&self) -> bool {
        self.rest.as_ref().is_none_or(|rest| rest.size_hint().exact().is_some())
    }

    /// Returns an upper bound of the bytes of text; `None` for a form.
    pub(crate) fn text_bytes(&self) -> Option<u64> {
        let ModelFinder::Json(scanner) = &self.finder else { return None };
        let rest = self.rest.as_ref().map_or(Some(0), |rest| rest.size_hint().exact());
        // If the length of the body is unknown, count only the part read so far.
        let all = self.held.len().saturating_add(rest.unwrap_or(0));
        Some(all.saturating_sub(scanner.media_bytes()))
    }

    /// Returns the prompt's texts, if the whole body has arrived and is valid.
    pub(crate) fn texts(&self) -> Option<PromptTexts> {
        let ModelFinder::Json(scanner) = &self.finder else { return None };
        if self.rest.is_some() || !scanner.is_complete_object() {
            return None;
        }
        PromptTexts::from_body(&self.held.joined())
    }

    /// Returns the next piece; `None` at the end. Cancel safe.
    async fn next(&mut self) -> Result<Option<Bytes>, BodyError> {
        while let Some(rest) = &mut self.rest {
            let Some(frame) = rest.frame().await else {
                self.end_arrival();
                break;
            };
            let Ok(piece) = frame?.into_data() else { continue };
            let is_last = rest.is_end_stream();
            self.note_piece(&piece)?;
            if is_last {
                self.end_arrival();
            }
            return Ok(Some(piece));
        }
        Ok(None)
    }

    /// Counts, scans and fingerprints an arrived piece.
    pub(crate) fn note_piece(&mut self, piece: &[u8]) -> Result<(), BodyError> {
        let bytes = piece.len() as u64;
        if self.sent.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.limits.bytes {
            return Err(BodyError::TooLarge);
        }
        for part in cache_sized_parts(piece) {
            match &mut self.finder {
                ModelFinder::Json(scanner) => scanner.feed(part),
                ModelFinder::Form(form) => form.feed(part),
                ModelFinder::PassedForm => {}
            }
            self.printer.add(part);
        }
        Ok(())
    }

    fn end_arrival(&mut self) {
        self.rest = None;
        self.sent.note_arrival();
        self.seal();
    }

    /// Records the fingerprint of the whole body.
    pub(crate) fn seal(&self) -> RequestFingerprint {
        let print = self.printer.finish();
        if self.sent.bytes.load(Ordering::Relaxed) > 0 {
            self.sent.set_fingerprint(print);
        }
        print
    }

    fn is_model_settled(&self) -> bool {
        match &self.finder {
            ModelFinder::Json(scanner) => scanner.settled(),
            ModelFinder::Form(form) => form.is_settled(),
            ModelFinder::PassedForm => true,
        }
    }

    /// Returns the model named in the part read so far.
    pub(crate) fn named_model(&self) -> BodyModel {
        match &self.finder {
            ModelFinder::Form(form) => {
                form.model().map_or(BodyModel::Nothing, |name| BodyModel::Model(name.to_owned()))
            }
            ModelFinder::PassedForm => BodyModel::Nothing,
            ModelFinder::Json(scanner) => match scanner.model() {
                ScannedModel::Named(name) => BodyModel::Model(name.clone()),
                ScannedModel::NotText => BodyModel::NotText,
                ScannedModel::Absent
                    if scanner.is_complete_object() || self.sent.bytes.load(Ordering::Relaxed) == 0 =>
                {
                    BodyModel::Nothing
                }
                ScannedModel::Absent => BodyModel::NotJson,
            },
        }
    }

    pub(crate) fn is_form(&self) -> bool {
        matches!(self.finder, ModelFinder::Form(_))
    }

    /// Returns whether the part read so far has exactly one `model`, which is a text.
    pub(crate) fn names_model_once(&self) -> bool {
        matches!(&self.finder, ModelFinder::Json(scanner) if scanner.models() == 1 && scanner.model_value().is_some())
    }

    pub(crate) fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        self.held.pieces()
    }

    pub(crate) fn edit(&mut self, edits: Vec<ByteEdit>) -> Result<(), RequestRefusal> {
        if self.held.edit(edits) { Ok(()) } else { Err(RequestRefusal::Busy) }
    }

    /// Replaces the model name, if one was found. A second name in the rest then fails the request.
    pub(crate) fn rename(&mut self, model: &str) -> Result<(), RequestRefusal> {
        let (range, text) = match &self.finder {
            ModelFinder::Json(scanner) => (scanner.model_value(), serde_json::Value::from(model).to_string()),
            ModelFinder::Form(form) => (form.model_value(), model.to_owned()),
            ModelFinder::PassedForm => return Ok(()),
        };
        let Some(range) = range else { return Ok(()) };
        self.one_model = true;
        self.edit(vec![ByteEdit { range, text }])
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.rest.is_none()
    }

    /// Returns whether the body is complete and asks for a stream.
    pub(crate) fn is_stream(&self) -> bool {
        self.is_whole() && matches!(&self.finder, ModelFinder::Json(scanner) if scanner.is_stream())
    }

    /// Returns the JSON body, if it is complete.
    pub(crate) fn json(&self) -> Option<Bytes> {
        let whole = self.is_whole() && matches!(self.finder, ModelFinder::Json(_));
        whole.then(|| self.held.joined())
    }

    pub(crate) fn len(&self) -> u64 {
        self.held.len()
    }

    /// Returns whether the body may be held until the answer is complete: ample budget, no media.
    pub(crate) fn may_be_held(&self) -> bool {
        let (images, audio) = self.sent.media();
        images + audio == 0 && self.held.is_ample()
    }

    /// Counts images and recordings in the part read so far.
    pub(crate) fn media(&self) -> (u64, u64) {
        self.count_media();
        self.sent.media()
    }

    /// Returns another handle on a complete JSON body, counted again, if the budget has room.
    pub(crate) fn held_copy(&self) -> Option<HeldPieces> {
        let whole = self.is_whole() && matches!(self.finder, ModelFinder::Json(_));
        let mut held = self.held.new_empty();
        let fits = whole && self.held.shared_pieces().into_iter().all(|piece| held.push_ahead(piece).is_ok());
        fits.then_some(held)
    }

    /// Holds another body under the same budget; `None` if it has no room.
    pub(crate) fn hold_other(&self, body: Bytes) -> Option<HeldPieces> {
        let mut held = self.held.new_empty();
        held.push(body).ok().map(|()| held)
    }

    /// Returns the pieces to send, and keeps them for another attempt.
    pub(crate) fn pieces_to_repeat(&mut self) -> (VecDeque<Bytes>, Arc<SentBody>) {
        self.count_media();
        self.sent = Arc::new(SentBody::for_resend(&self.sent));
        (self.held.shared_pieces(), self.sent.clone())
    }

    /// Prepares to send the body once, as it arrives. Returns whether there is anything to send.
    pub(crate) fn begin_passing(&mut self) -> bool {
        self.count_media();
        if self.is_form() {
            self.finder = ModelFinder::PassedForm;
        }
        self.held.len() > 0 || self.rest.is_some()
    }

    pub(crate) fn has_second_model(&self) -> bool {
        self.one_model && matches!(&self.finder, ModelFinder::Json(scanner) if scanner.models() > 1)
    }

    pub(crate) fn count_media(&self) {
        match &self.finder {
            ModelFinder::Json(scanner) => self.sent.note_media(scanner.images(), scanner.audio()),
            // llama-server accepts forms only for transcriptions, which have one recording.
            ModelFinder::Form(_) => self.sent.note_media(0, 1),
            ModelFinder::PassedForm => {}
        }
    }
}
