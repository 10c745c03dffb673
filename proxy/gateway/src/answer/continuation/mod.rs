//! Continues a streamed answer whose server died: another server computes the rest, and the client sees one
//! stream.
//!
//! ```text
//!   transcript (what the client has) ----+
//!   request (as sent to the dead server) +--> plain text, and all of it is understood?
//!      | no, or the next server's own view of the request rules it out
//!      |   +--> same answer expected again? --> the request once more, compared with the transcript (`repeat`)
//!      |   |       +--> it differs --> the other ways, on the same server
//!      |   +--> a thought, a text, a begun call? --> the request with these as the beginning of the answer,
//!      |                             if the next server shows that it continues there (`prefilling`)
//!      | yes
//!      +--> probe: how does the next server see the request?
//!      +--> chat: its prompt, rendered there --> tokens of the delivered text
//!             |
//!             v
//!        prompt and those tokens, for the rest (`rest`) --> voice --> the client
//! ```
//!
//! In doubt the stream ends with an error: the client must never get half of one answer followed by half of
//! another. So another server gets tokens under three conditions only. Its command, binary and files are
//! those of the dead server; every member of the request is known; the server counts the expected number of
//! prompt tokens. The answer to a repeated request must begin with the text that the client has.

use tokio::time::Instant;
use warden_policies::WorkDone;

use self::asking::{ContinuationClient, ProbedResponse, side_request};
use self::first::FirstServer;
use self::prefill::PrefillContinuation;
use self::prefilling::prefill_request;
use self::repeat::{OTHER_ANSWER, PromptShift, SamplingRepeat};
use self::request::{ContinuationRequest, NoContinuationReason, ProbedSettings};
use self::rest::RestTranslator;
use crate::answer::AnswerFormat;
use crate::backend::{
    AnsweringBackend, AttemptAnswer, BackendAttempts, RelayedAnswer, RepeatableRequest, SharedLease,
    UpstreamRequest,
};
use crate::observe::{RequestOutcome, RequestRecord};
use crate::refusal::RequestRefusal;

pub(crate) use self::repeat::{RepeatTranslator, UnrepeatedAnswer};
pub(crate) use self::transcript::{AnswerStage, AnswerTranscript};
pub(crate) use self::voice::{DONE, EventTranslator};

mod asking;
mod first;
mod prefill;
mod prefilling;
mod reading;
mod repeat;
mod request;
mod rest;
mod said;
mod short_chat;
mod spelling;
mod tool_call;
mod transcript;
mod voice;

/// Maximum size of an answer to a question of the gateway, without the part that grows with the question.
const ANSWER_BASE_BYTES: usize = 64 * 1024;

/// Maximum size of the answer per byte of the question: each token is listed with its number and its text.
const ANSWER_BYTES_PER_BYTE: usize = 48;

/// Error for a stream that cannot be continued.
#[derive(Debug)]
pub(crate) struct StreamCut {
    pub(crate) outcome: RequestOutcome,
    pub(crate) message: String,
}

impl From<RequestRefusal> for StreamCut {
    fn from(refusal: RequestRefusal) -> Self {
        Self { outcome: refusal.outcome(), message: refusal.to_string() }
    }
}

pub(crate) fn wants_usage(again: &RepeatableRequest) -> bool {
    let body = again.message.json().unwrap_or_default();
    let body = serde_json::from_slice::<serde_json::Value>(&body);
    body.map_or(true, |body| body["stream_options"]["include_usage"] == true)
}

/// Returns whether a request has a single answer, whose end is visible in the stream.
pub(crate) fn has_single_answer(again: &RepeatableRequest, heard: &AnswerTranscript) -> bool {
    again.message.json().is_some_and(|body| repeat::check_single_answer(heard.kind, &body).is_ok())
}

pub(crate) fn describe_server_end(outcome: RequestOutcome) -> &'static str {
    match outcome {
        RequestOutcome::Revoked => "its process was stopped in the middle of the answer",
        _ => "its process ended in the middle of the answer",
    }
}

pub(crate) fn rest_error_text(died: &str, why: &str) -> String {
    format!("{died} (the rest of it cannot be computed elsewhere: {why})")
}

/// Requests the rest of an answer from another server. `died` is the error about the first server; `paid` is
/// the work for the part that the client has.
pub(crate) async fn continue_answer(
    again: RepeatableRequest,
    heard: Box<AnswerTranscript>,
    record: &mut RequestRecord,
    dead: SharedLease,
    died: RequestRefusal,
    paid: WorkDone,
) -> Result<(RelayedAnswer, EventTranslator), StreamCut> {
    let outcome = died.outcome();
    let words = format!("model `{}`: {}", again.search.model, describe_server_end(outcome));
    let delivered = DeliveredAnswer { heard: *heard, paid };
    let rest = compute_rest(again, delivered, record, dead, died).await;
    rest.map_err(|stop| match stop {
        ContinuationStop::NotThisWay(why) | ContinuationStop::NoWay(why) => {
            StreamCut { outcome, message: rest_error_text(&words, &why) }
        }
        ContinuationStop::Refused(refusal) => refusal.into(),
    })
}

/// Continues an answer in another way, after the next server's repetition differed from the client's part.
/// That server still holds the `lease`.
pub(crate) async fn continue_otherwise(
    again: RepeatableRequest,
    repeat: UnrepeatedAnswer,
    record: &mut RequestRecord,
    lease: SharedLease,
) -> Result<(RelayedAnswer, EventTranslator), StreamCut> {
    let outcome = RequestOutcome::UpstreamDied;
    let words = format!("model `{}`: {}", again.search.model, describe_server_end(outcome));
    let rest = compute_rest_otherwise(again, repeat, record, lease).await;
    rest.map_err(|stop| match stop {
        ContinuationStop::NotThisWay(why) | ContinuationStop::NoWay(why) => {
            StreamCut { outcome, message: rest_error_text(&words, &why) }
        }
        ContinuationStop::Refused(refusal) => refusal.into(),
    })
}

enum ContinuationStop {
    /// This method is impossible; another method may work.
    NotThisWay(NoContinuationReason),
    NoWay(NoContinuationReason),
    Refused(RequestRefusal),
}

impl From<NoContinuationReason> for ContinuationStop {
    fn from(why: NoContinuationReason) -> Self {
        Self::NotThisWay(why)
    }
}

/// Methods of continuing an answer, each with the reason if it is impossible.
struct ContinuationPlans {
    tokens: Result<TokenContinuation, NoContinuationReason>,
    repeat: Result<SamplingRepeat, NoContinuationReason>,
    prefill: Result<PrefillContinuation, NoContinuationReason>,
    first: Option<FirstServer>,
}

impl ContinuationPlans {
    fn from_request(
        heard: &AnswerTranscript,
        body: &[u8],
        first: Option<FirstServer>,
    ) -> Result<Self, ContinuationStop> {
        let kind = heard.kind;
        let repeat =
            if heard.has_no_token() { Ok(SamplingRepeat::Same) } else { repeat::may_repeat(kind, body) };
        let prefill = match first {
            Some(_) => PrefillContinuation::from_body(heard, body),
            None => Err(unknown_server_reason()),
        };
        let tokens = TokenContinuation::from_request(heard, body, first, &repeat);
        Self { tokens, repeat, prefill, first }.check_any()
    }

    /// Methods other than a repetition, which has differed.
    fn without_repeat(
        heard: &AnswerTranscript,
        body: &[u8],
        first: FirstServer,
    ) -> Result<Self, ContinuationStop> {
        let repeat = Err(OTHER_ANSWER.to_owned());
        let tokens = TokenContinuation::from_request(heard, body, Some(first), &repeat);
        let prefill = PrefillContinuation::from_body(heard, body);
        Self { tokens, repeat, prefill, first: Some(first) }.check_any()
    }

    fn check_any(self) -> Result<Self, ContinuationStop> {
        let Self { tokens, repeat, prefill, .. } = &self;
        match (tokens, repeat, prefill) {
            (Err(why), Err(nor), Err(nor_text)) => Err(no_method_stop(why, nor, nor_text)),
            _ => Ok(self),
        }
    }

    /// Returns whether to repeat the request at once, without a question to the next server.
    fn repeats_at_once(&self) -> bool {
        // The server's default settings may decide, so ask for them first if another method is possible.
        let asks_first = self.repeat == Ok(SamplingRepeat::Default) && self.prefill.is_ok();
        self.tokens.is_err() && self.repeat.is_ok() && !asks_first
    }

    /// Builds the question that shows how the next server reads the request.
    fn probe(&self, message: &UpstreamRequest) -> Result<UpstreamRequest, NoContinuationReason> {
        match &self.tokens {
            Ok(plan) => side_request(message, None, plan.wish.probe_request(), false),
            Err(_) => {
                side_request(message, Some("/completion"), PrefillContinuation::settings_request(), false)
            }
        }
    }
}

/// The part of an answer that the client has, and the work for it.
struct DeliveredAnswer {
    heard: AnswerTranscript,
    paid: WorkDone,
}

impl DeliveredAnswer {
    fn repeated(self, first: Option<FirstServer>) -> Result<EventTranslator, ContinuationStop> {
        let repeat = RepeatTranslator::from_transcript(self.heard, self.paid);
        repeat.map(|repeat| EventTranslator::repeat(repeat.or_otherwise(first))).ok_or_else(no_event_stop)
    }

    fn prefilled(self, shift: PromptShift) -> Result<EventTranslator, ContinuationStop> {
        let repeat = RepeatTranslator::after_prefix(self.heard, self.paid, shift);
        repeat.map(EventTranslator::repeat).ok_or_else(no_event_stop)
    }
}

async fn compute_rest(
    again: RepeatableRequest,
    delivered: DeliveredAnswer,
    record: &mut RequestRecord,
    dead: SharedLease,
    died: RequestRefusal,
) -> Result<(RelayedAnswer, EventTranslator), ContinuationStop> {
    let RepeatableRequest { search, message, deadline } = again;
    let Some(body) = message.json() else {
        return Err(ContinuationStop::NoWay("its request is not kept".to_owned()));
    };
    repeat::check_single_answer(delivered.heard.kind, &body).map_err(ContinuationStop::NoWay)?;
    let first = dead.kin().map(|kin| FirstServer { kin, by_canary: dead.is_canary() });
    let plans = ContinuationPlans::from_request(&delivered.heard, &body, first)?;
    let mut attempts = BackendAttempts::new(&search, record);
    // The client does not learn of a canary's death.
    attempts.died = (!dead.is_canary()).then_some(died);
    let lease = attempts
        .lease_once_more(dead)
        .await
        .map_err(|refusal| ContinuationStop::Refused(attempts.choose_refusal(refusal)))?;
    if plans.repeats_at_once() {
        let translator = delivered.repeated(plans.first)?;
        attempts.keeps_message = true;
        let relayed = attempts.run(lease, message, deadline).await.map_err(ContinuationStop::Refused)?;
        return Ok((relayed, translator));
    }
    let server = ProbedServer::probe(&plans, attempts, message, lease, deadline).await?;
    continue_after_probe(plans, delivered, &body, server).await
}

async fn compute_rest_otherwise(
    again: RepeatableRequest,
    (heard, paid, first): UnrepeatedAnswer,
    record: &mut RequestRecord,
    lease: SharedLease,
) -> Result<(RelayedAnswer, EventTranslator), ContinuationStop> {
    let RepeatableRequest { search, message, deadline } = again;
    let Some(body) = message.json() else {
        return Err(ContinuationStop::NoWay("its request is not kept".to_owned()));
    };
    let plans = ContinuationPlans::without_repeat(&heard, &body, first)?;
    let mut attempts = BackendAttempts::new(&search, record);
    attempts.died = Some(RequestRefusal::Died { model: search.model.clone() });
    let server = ProbedServer::probe_held(&plans, attempts, message, lease, deadline).await?;
    continue_after_probe(plans, DeliveredAnswer { heard, paid }, &body, server).await
}

/// The next server, and its answer to the first question.
struct ProbedServer<'a> {
    asking: ContinuationClient<'a>,
    probed: ProbedResponse,
}

impl<'a> ProbedServer<'a> {
    async fn probe(
        plans: &ContinuationPlans,
        mut attempts: BackendAttempts<'a>,
        message: Box<UpstreamRequest>,
        lease: SharedLease,
        deadline: Instant,
    ) -> Result<Self, ContinuationStop> {
        let probe = plans.probe(&message)?;
        // The probe obeys all rules for a suspect: it may have to wait until no other request runs on the
        // server.
        let probed =
            attempts.run(lease, Box::new(probe), deadline).await.map_err(ContinuationStop::Refused)?;
        let RelayedAnswer { response, backend, .. } = probed;
        let AnsweringBackend { lease, revoked, conn, pool, sent, deadline, .. } = *backend;
        let asking = ContinuationClient { attempts, message, lease, revoked, deadline };
        let probed = ProbedResponse { response, conn, is_sent: sent.sent_fingerprint().is_some(), pool };
        Ok(Self { asking, probed })
    }

    /// Probes the server that has repeated the answer, and no other one: no request is executed a third time.
    /// A suspect is still alone there.
    async fn probe_held(
        plans: &ContinuationPlans,
        attempts: BackendAttempts<'a>,
        message: Box<UpstreamRequest>,
        lease: SharedLease,
        deadline: Instant,
    ) -> Result<Self, ContinuationStop> {
        let mut probe = plans.probe(&message)?;
        let revoked = Box::pin(lease.clone().revoked());
        let mut asking = ContinuationClient { attempts, message, lease, revoked, deadline };
        asking.attempts.note_side_question(&mut probe);
        let AttemptAnswer { response, conn, pool } = asking.attempt(&mut probe).await?;
        let probed = ProbedResponse { response, conn, is_sent: probe.sent().is_whole(), pool };
        Ok(Self { asking, probed })
    }
}

/// Tries the methods in their order after the probe.
async fn continue_after_probe(
    plans: ContinuationPlans,
    delivered: DeliveredAnswer,
    body: &[u8],
    server: ProbedServer<'_>,
) -> Result<(RelayedAnswer, EventTranslator), ContinuationStop> {
    let ContinuationPlans { tokens, repeat, prefill, first } = plans;
    let ProbedServer { mut asking, probed } = server;
    let (why, is_greedy, settings) = match tokens {
        Ok(mut plan) => match plan.rest_request(&mut asking, &delivered.heard, probed).await {
            Ok((path, rest, translator)) => {
                return Ok((asking.request_rest(path, rest).await?, EventTranslator::Rest(translator)));
            }
            Err(ContinuationStop::NotThisWay(why)) => (why, plan.is_greedy, None),
            Err(stop) => return Err(stop),
        },
        Err(why) => {
            let settings = match asking.read_probe(probed).await {
                // The probe's answer is unusable: continue without the settings.
                Err(ContinuationStop::NotThisWay(_)) => Vec::new(),
                told => told?,
            };
            // The comparison of the two answers covers settings that the build does not report.
            (why, PrefillContinuation::is_greedy(&settings).ok(), Some(settings))
        }
    };
    let nor = match repeat.and_then(|repeat| repeat.check_repeats(is_greedy)) {
        Ok(()) => {
            let translator = delivered.repeated(first)?;
            return Ok((asking.request_rest(None, body.to_vec()).await?, translator));
        }
        Err(nor) => nor,
    };
    let prefilled = match prefill {
        Ok(_) if !first.is_some_and(|first| first.may_be_continued_by(asking.lease.kin())) => {
            Err(other_server_reason().into())
        }
        Ok(mut prefill) => {
            prefill_request(&mut asking, &mut prefill, settings, first.map(|first| first.kin)).await
        }
        Err(nor_text) => Err(ContinuationStop::NotThisWay(nor_text)),
    };
    match prefilled {
        Ok((rest, shift)) => {
            let translator = delivered.prefilled(shift)?;
            Ok((asking.request_rest(None, rest).await?, translator))
        }
        Err(ContinuationStop::NotThisWay(nor_text)) => Err(no_method_stop(&why, &nor, &nor_text)),
        Err(stop) => Err(stop),
    }
}

fn unknown_server_reason() -> NoContinuationReason {
    "it is not known what its server was started from".to_owned()
}

fn no_method_stop(why: &str, nor: &str, nor_text: &str) -> ContinuationStop {
    ContinuationStop::NoWay(format!(
        "{why}; and sent once more, {nor}; and as the beginning of a message, {nor_text}"
    ))
}

fn other_server_reason() -> NoContinuationReason {
    "the process that follows was started from something else".to_owned()
}

fn no_event_stop() -> ContinuationStop {
    ContinuationStop::NoWay("it has no event".to_owned())
}

/// An answer that may be continued by its tokens, before any question to the server.
struct TokenContinuation {
    wish: ContinuationRequest,
    kin: FirstServer,
    /// True if a repetition of the request may give the same answer.
    is_repeatable: bool,
    /// True if the next server gives the same answer to the same request each time.
    is_greedy: Option<bool>,
}

impl TokenContinuation {
    fn from_request(
        heard: &AnswerTranscript,
        body: &[u8],
        kin: Option<FirstServer>,
        may_repeat: &Result<SamplingRepeat, NoContinuationReason>,
    ) -> Result<Self, NoContinuationReason> {
        let kind = heard.kind;
        heard.is_plain()?;
        let mut wish = ContinuationRequest::from_body(kind, body)?;
        if wish.is_shaped() && *may_repeat == Ok(SamplingRepeat::Same) {
            // The raw answer may have blanks and code fences that the client did not get.
            return Err("it has a format, and can be repeated exactly".to_owned());
        }
        // The next server generates tokens with withheld text again. In llama-server's own dialect the client
        // has these tokens, although not their text.
        if heard.has_withheld_text() && (kind == AnswerFormat::Native || !wish.has_stop_words()) {
            return Err("its last tokens have no text, or stop words may begin there".to_owned());
        }
        if heard.decode_string().contains('\u{FFFD}') && heard.all_token_ids().is_none() {
            return Err("its text has bytes that are no characters".to_owned());
        }
        let kin = kin.ok_or_else(unknown_server_reason)?;
        // A server with a default token limit would count the tokens of the rest from zero.
        wish.limit = wish.limit.or(kin.kin.answer_tokens);
        Ok(Self { wish, kin, is_repeatable: may_repeat.is_ok(), is_greedy: None })
    }

    /// Returns path and body of the request for the rest, after the answer to the probe.
    async fn rest_request(
        &mut self,
        asking: &mut ContinuationClient<'_>,
        heard: &AnswerTranscript,
        probed: ProbedResponse,
    ) -> Result<(Option<&'static str>, Vec<u8>, RestTranslator), ContinuationStop> {
        let kind = heard.kind;
        let wish = &self.wish;
        let frame = heard.frame.clone().ok_or_else(no_event_stop)?;
        if !self.kin.may_be_continued_by(asking.lease.kin()) {
            return Err(other_server_reason().into());
        }
        let told = asking.read_probe(probed).await?;
        self.is_greedy = request::is_greedy(kind, &told);
        let settings = ProbedSettings::from_probe(kind, &told)?;
        match (wish.is_shaped(), settings.has_shape()) {
            (true, true) if settings.is_greedy && self.is_repeatable => {
                return Err("it has a format".to_owned().into());
            }
            (false, true) => return Err("its server computes with `grammar`".to_owned().into()),
            (true, false) => return Err("its server does not report its grammar".to_owned().into()),
            _ => {}
        }
        let marks = match &settings.marks[..] {
            [] => String::new(),
            marks => spelling::read_harmless_marks(
                &asking.ask(Some("/detokenize"), spelling::detokenize_request(marks)).await?,
            )?,
        };
        let rendered = match kind {
            AnswerFormat::Chat => Some(spelling::read_rendered(
                &asking.ask(Some("/apply-template"), wish.template_request()).await?,
            )?),
            _ => None,
        };
        if let Some(rendered) = &rendered
            && settings.may_hide_thought(&marks, rendered)
        {
            return Err("its model may have reasoned before that text".to_owned().into());
        }
        let ids = read_ids(asking, heard).await?;
        let text = heard.decode_string();
        if let Some(measure) = wish.grammar_test(&settings, rendered.clone(), &ids, text) {
            // A vocabulary that tokenizes the text differently makes this test fail.
            let is_in_place = match asking.ask(Some("/completion"), measure).await {
                Ok(answer) => request::is_grammar_in_place(&answer),
                Err(ContinuationStop::NotThisWay(_)) => false,
                Err(stop) => return Err(stop),
            };
            if !is_in_place {
                return Err("its build does not apply a grammar from that text on".to_owned().into());
            }
        }
        let rest = wish.rest_request(&settings, rendered, &ids, text);
        let voice = RestTranslator {
            kind,
            frame,
            delivered: ids.len() as u64,
            prompt: settings.prompt,
            text: heard.decode_string().to_owned(),
            limit: wish.limit,
            wants_usage: wish.wants_usage,
            ended: false,
        };
        Ok(((kind == AnswerFormat::Chat).then_some("/completion"), rest, voice))
    }
}

/// Returns the tokens of the client's text.
async fn read_ids(
    asking: &mut ContinuationClient<'_>,
    heard: &AnswerTranscript,
) -> Result<Vec<u32>, ContinuationStop> {
    let text = heard.decode_string();
    if let Some(ids) = heard.all_token_ids() {
        return Ok(ids.to_vec());
    }
    if text.is_empty() {
        return Ok(Vec::new());
    }
    if spelling::has_marks(text) {
        return Err("its text has special tokens of a template".to_owned().into());
    }
    let answer = asking.ask(Some("/tokenize"), spelling::tokenize_request(heard)).await?;
    let ids = spelling::read_tokens(&answer, text);
    // A token count that the stream reported must equal the number of tokens.
    let ids = ids.filter(|ids| heard.tokens.counted.is_none_or(|counted| counted == ids.len() as u64));
    Ok(ids.ok_or_else(|| "its vocabulary tokenizes that text differently".to_owned())?)
}
