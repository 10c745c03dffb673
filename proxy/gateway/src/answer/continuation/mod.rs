//! Continues a streamed answer whose server died: another server computes the rest, and the client sees one
//! stream.
//!
//! ```text
//!   transcript (what the client has) ----+
//!   request (as sent to the dead server) +--> plain text, and all of it is understood?
//!      | no, or the next server's own view of the request rules it out
//!      |   +--> same answer expected again? --> the request once more, compared with the transcript (`repeat`)
//!      |   +--> one text so far? --> the request with that text as the beginning of the answer,
//!      |                             if the next server shows that it continues there (`prefill`)
//!      | yes
//!      +--> probe: how does the next server see the request?
//!      +--> chat: its prompt, rendered there --> tokens of the delivered text
//!             |
//!             v
//!        prompt and those tokens, for the rest (`rest`) --> voice --> the client
//! ```
//!
//! In doubt the stream ends with an error, because the client must never get half of one answer followed by
//! an unrelated second half. Therefore tokens are only sent to a server with the same command, binary and
//! files as the dead one, only if every member of the request is known, and only if the server counts the
//! expected number of prompt tokens. The answer to a repeated request must begin with the text that the
//! client has.

mod asking;
mod prefill;
mod reading;
mod repeat;
mod request;
mod rest;
mod said;
mod spelling;
mod transcript;
mod voice;

use std::sync::Arc;
use std::time::Duration;

use warden_policies::WorkDone;
use warden_supervisor::AnswerIdentity;

use self::asking::{ContinuationClient, ProbedResponse, side_request};
use self::prefill::PrefillContinuation;
pub(crate) use self::repeat::RepeatTranslator;
use self::repeat::{PromptShift, SamplingRepeat};
use self::request::{ContinuationRequest, NoContinuationReason, ProbedSettings};
use self::rest::RestTranslator;
pub(crate) use self::transcript::{AnswerStage, AnswerTranscript};
pub(crate) use self::voice::{DONE, EventTranslator};
use crate::answer::assemble::AnswerFormat;
use crate::backend::again::{BackendSearch, RepeatableRequest};
use crate::backend::attempts::{AnsweringBackend, BackendAttempts, RelayedAnswer};
use crate::backend::backends::BackendLease;
use crate::observe::{RequestOutcome, RequestRecord};
use crate::refusal::RequestRefusal;

/// Bytes allowed in the answer to a question of the gateway (settings, tokens, a prompt), apart from the
/// part that grows with the question.
const ANSWER_BASE_BYTES: usize = 64 * 1024;

/// Bytes allowed in the answer for each byte of the question: each token is listed with its number and its
/// text.
const ANSWER_BYTES_PER_BYTE: usize = 48;

/// Error with which a stream ends if it cannot be continued.
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

/// Returns whether a request asks for usage counters at the end of its stream.
pub(crate) fn wants_usage(again: &RepeatableRequest) -> bool {
    let body = again.message.json().unwrap_or_default();
    let body = serde_json::from_slice::<serde_json::Value>(&body);
    body.map_or(true, |body| body["stream_options"]["include_usage"] == true)
}

/// Returns whether a request has a single answer, whose end can be recognised in the stream.
pub(crate) fn has_single_answer(again: &RepeatableRequest, heard: &AnswerTranscript) -> bool {
    again.message.json().is_some_and(|body| repeat::check_single_answer(heard.kind(), &body).is_ok())
}

/// Describes in words how the server's process ended.
pub(crate) fn describe_server_end(outcome: RequestOutcome) -> &'static str {
    match outcome {
        RequestOutcome::Revoked => "its process was stopped in the middle of the answer",
        _ => "its process ended in the middle of the answer",
    }
}

/// Returns the error text that the client gets in place of the rest of the answer.
pub(crate) fn rest_error_text(died: &str, why: &str) -> String {
    format!("{died} (the rest of it cannot be computed elsewhere: {why})")
}

/// Requests the rest of an answer from another server. `died` is the client's error text if that fails;
/// `paid` is the work that the client has already received.
pub(crate) async fn continue_answer(
    again: RepeatableRequest,
    heard: Box<AnswerTranscript>,
    record: &mut RequestRecord,
    dead: Arc<dyn BackendLease>,
    died: RequestRefusal,
    paid: WorkDone,
) -> Result<(RelayedAnswer, EventTranslator), StreamCut> {
    let outcome = died.outcome();
    let words = format!("model `{}`: {}", again.search.model, describe_server_end(outcome));
    let gone_on = compute_rest(again, *heard, record, dead, died, paid).await;
    gone_on.map_err(|stop| match stop {
        ContinuationStop::NotThisWay(why) | ContinuationStop::NoWay(why) => {
            StreamCut { outcome, message: rest_error_text(&words, &why) }
        }
        ContinuationStop::Refused(refusal) => refusal.into(),
    })
}

/// Reasons to stop a continuation.
enum ContinuationStop {
    /// This method is impossible; another method may work.
    NotThisWay(NoContinuationReason),
    /// No method works.
    NoWay(NoContinuationReason),
    Refused(RequestRefusal),
}

impl From<NoContinuationReason> for ContinuationStop {
    fn from(why: NoContinuationReason) -> Self {
        Self::NotThisWay(why)
    }
}

async fn compute_rest(
    again: RepeatableRequest,
    heard: AnswerTranscript,
    record: &mut RequestRecord,
    dead: Arc<dyn BackendLease>,
    died: RequestRefusal,
    paid: WorkDone,
) -> Result<(RelayedAnswer, EventTranslator), ContinuationStop> {
    let RepeatableRequest { search, message } = again;
    let BackendSearch { upstream, progress, model, kind: lease_kind, tokens, limits, deadline } = search;
    let kind = heard.kind();
    let Some(body) = message.json() else {
        return Err(ContinuationStop::NoWay("its request is not kept".to_owned()));
    };
    repeat::check_single_answer(kind, &body).map_err(ContinuationStop::NoWay)?;
    let may_repeat =
        if heard.has_no_token() { Ok(SamplingRepeat::Same) } else { repeat::may_repeat(kind, &body) };
    let kin = dead.kin().map(|kin| FirstServer { kin, by_canary: dead.is_canary() });
    let prefill = match kin {
        Some(_) => PrefillContinuation::from_body(&heard, &body),
        None => Err("it is not known what its server was started from".to_owned()),
    };
    let all = |why: NoContinuationReason, nor: NoContinuationReason, nor_text: NoContinuationReason| {
        ContinuationStop::NoWay(format!(
            "{why}; and sent once more, {nor}; and as the beginning of a message, {nor_text}"
        ))
    };
    let planned = TokenContinuation::from_request(&heard, &body, kin, &may_repeat);
    if let (Err(why), Err(nor), Err(nor_text)) = (&planned, &may_repeat, &prefill) {
        return Err(all(why.clone(), nor.clone(), nor_text.clone()));
    }
    let mut attempts = BackendAttempts {
        upstream: &upstream,
        record,
        progress: &progress,
        model: &model,
        kind: lease_kind,
        tokens,
        // The request was admitted before, and the model's process is restarted in any case.
        may_load: true,
        limits: &limits,
        // The death of a canary is not reported to the client.
        died: (!dead.is_canary()).then_some(died),
        patience: Duration::ZERO,
    };
    let lease = attempts
        .lease_once_more(dead)
        .await
        .map_err(|refusal| ContinuationStop::Refused(attempts.choose_refusal(refusal)))?;
    let repeat = |heard| {
        RepeatTranslator::from_transcript(heard, paid).map(EventTranslator::Repeat).ok_or_else(no_event_stop)
    };
    // If the server's default settings decide whether the answer is repeatable, ask for the settings first,
    // provided that another method is possible.
    let asks_first = may_repeat == Ok(SamplingRepeat::Default) && prefill.is_ok();
    if planned.is_err() && may_repeat.is_ok() && !asks_first {
        let voice = repeat(heard)?;
        let relayed = attempts.run(lease, message, deadline).await.map_err(ContinuationStop::Refused)?;
        return Ok((relayed, voice));
    }
    let probe = match &planned {
        Ok(plan) => side_request(&message, None, plan.wish.probe_request(), false)?,
        Err(_) => {
            side_request(&message, Some("/completion"), PrefillContinuation::settings_request(), false)?
        }
    };
    // The probe obeys all rules for a suspect request, which may have to wait until no other request runs
    // there.
    let probed = attempts.run(lease, Box::new(probe), deadline).await.map_err(ContinuationStop::Refused)?;
    let RelayedAnswer { response, backend, .. } = probed;
    let AnsweringBackend { lease, revoked, conn, pool, sent, deadline, .. } = *backend;
    let mut asking = ContinuationClient { attempts, message, lease, revoked, deadline };
    let probed = (response, (conn, sent.sent_fingerprint().is_some()), pool);
    let (why, nor, settings) = match planned {
        Ok(mut plan) => match plan.rest_request(&mut asking, &heard, probed).await {
            Ok((path, rest, voice)) => {
                return Ok((asking.request_rest(path, rest).await?, EventTranslator::Rest(voice)));
            }
            Err(ContinuationStop::NotThisWay(why)) => {
                match may_repeat.and_then(|draw| draw.check_repeats(plan.is_greedy)) {
                    Ok(()) => {
                        let voice = repeat(heard)?;
                        return Ok((asking.request_rest(None, body.to_vec()).await?, voice));
                    }
                    Err(nor) => (why, nor, None),
                }
            }
            Err(stop) => return Err(stop),
        },
        Err(why) => {
            let settings = match asking.read_probe(probed).await {
                // The probe's answer is unusable: continue without the settings.
                Err(ContinuationStop::NotThisWay(_)) => Vec::new(),
                told => told?,
            };
            let is_greedy = PrefillContinuation::is_greedy(&settings).ok();
            match may_repeat.and_then(|draw| draw.check_repeats(is_greedy)) {
                // Settings that the build does not report are covered by the comparison of the two answers.
                Ok(()) => {
                    let voice = repeat(heard)?;
                    return Ok((asking.request_rest(None, body.to_vec()).await?, voice));
                }
                Err(nor) => (why, nor, Some(settings)),
            }
        }
    };
    let said = match prefill {
        Ok(_) if !kin.is_some_and(|kin| kin.may_be_continued_by(asking.lease.kin())) => {
            Err(other_server_reason().into())
        }
        Ok(prefill) => prefill_request(&mut asking, &prefill, settings, kin.map(|kin| kin.kin)).await,
        Err(nor_text) => Err(ContinuationStop::NotThisWay(nor_text)),
    };
    match said {
        Ok((rest, shift)) => {
            let voice = RepeatTranslator::after_prefix(heard, paid, shift)
                .map(EventTranslator::Repeat)
                .ok_or_else(no_event_stop)?;
            Ok((asking.request_rest(None, rest).await?, voice))
        }
        Err(ContinuationStop::NotThisWay(nor_text)) => Err(all(why, nor, nor_text)),
        Err(stop) => Err(stop),
    }
}

/// Builds the request for the rest after a text, if the next server shows that it continues after this
/// text. `settings`: the server's settings, if already known. Otherwise they are requested before the
/// prompt is sent, because the question would overwrite the slot that holds the prompt.
async fn prefill_request(
    asking: &mut ContinuationClient<'_>,
    prefill: &PrefillContinuation,
    settings: Option<Vec<u8>>,
    kin: Option<AnswerIdentity>,
) -> Result<(Vec<u8>, PromptShift), ContinuationStop> {
    let settings = match settings {
        Some(settings) => settings,
        None => asking.ask("/completion", PrefillContinuation::settings_request()).await?,
    };
    PrefillContinuation::is_greedy(&settings)?;
    let tokens =
        spelling::read_count(&asking.ask("/tokenize", spelling::count_request(&prefill.text)).await?)?;
    let rest = prefill.rest_request(tokens, kin.and_then(|kin| kin.answer_tokens))?;
    let first = prefill.read_counts(&asking.ask_own_route(prefill.first_request()).await?)?;
    let mut before = None;
    for text in prefill.text_steps(first.prompt, tokens) {
        let spelled = if text == prefill.text {
            tokens
        } else {
            spelling::read_count(&asking.ask("/tokenize", spelling::count_request(text)).await?)?
        };
        let now = prefill.read_counts(&asking.ask_own_route(prefill.second_request(text)).await?)?;
        PrefillContinuation::check_continues(&first, before.as_ref(), &now, (text, spelled))?;
        before = Some(now);
    }
    Ok((rest, PrefillContinuation::prompt_shift(&first, tokens)))
}

/// Identity of the server that began an answer.
#[derive(Clone, Copy)]
struct FirstServer {
    kin: AnswerIdentity,
    /// The server was a canary.
    by_canary: bool,
}

impl FirstServer {
    /// Returns whether a server with this identity may compute the rest: it needs the same command, binary
    /// and files.
    ///
    /// The model's normal build may also continue the answer of a canary, whose command and files differ in
    /// the binary only. Both builds have the same vocabulary. The normal build computes the rest from the
    /// prompt as this build renders it and from exactly the text that the client has, so this build might
    /// have given the whole answer.
    fn may_be_continued_by(self, next: Option<AnswerIdentity>) -> bool {
        let Some(next) = next else { return false };
        next == self.kin
            || self.by_canary
                && (next.but_for_binary, next.answer_tokens)
                    == (self.kin.but_for_binary, self.kin.answer_tokens)
    }
}

fn other_server_reason() -> NoContinuationReason {
    "the process that follows was started from something else".to_owned()
}

fn no_event_stop() -> ContinuationStop {
    ContinuationStop::NoWay("it has no event".to_owned())
}

/// An answer that can be continued by its tokens, as far as the gateway knows without asking the server.
struct TokenContinuation {
    wish: ContinuationRequest,
    kin: FirstServer,
    /// The next server gives the same answer to the same request each time.
    is_greedy: Option<bool>,
}

impl TokenContinuation {
    fn from_request(
        heard: &AnswerTranscript,
        body: &[u8],
        kin: Option<FirstServer>,
        may_repeat: &Result<SamplingRepeat, NoContinuationReason>,
    ) -> Result<Self, NoContinuationReason> {
        let kind = heard.kind();
        heard.is_plain()?;
        let mut wish = ContinuationRequest::from_body(kind, body)?;
        if wish.is_shaped() && *may_repeat == Ok(SamplingRepeat::Same) {
            // The raw answer may have blanks and code fences around the text, which the client did not get.
            return Err("it has a format, and can be repeated exactly".to_owned());
        }
        // Tokens whose text was withheld from the client are generated again. In llama-server's own dialect
        // the client has these tokens, although not their text.
        if heard.has_withheld_text() && (kind == AnswerFormat::Native || !wish.has_stop_words()) {
            return Err("its last tokens have no text, or stop words may begin there".to_owned());
        }
        if heard.decode_string().contains('\u{FFFD}') && heard.all_token_ids().is_none() {
            return Err("its text has bytes that are no characters".to_owned());
        }
        let Some(kin) = kin else {
            return Err("it is not known what its server was started from".to_owned());
        };
        // A server with a default token limit would count the tokens of the rest from zero.
        wish.limit = wish.limit.or(kin.kin.answer_tokens);
        Ok(Self { wish, kin, is_greedy: None })
    }

    /// Returns path and body of the request for the rest, after the server has reported how it reads the
    /// client's request.
    async fn rest_request(
        &mut self,
        asking: &mut ContinuationClient<'_>,
        heard: &AnswerTranscript,
        probed: ProbedResponse,
    ) -> Result<(Option<&'static str>, Vec<u8>, RestTranslator), ContinuationStop> {
        let kind = heard.kind();
        let wish = &self.wish;
        let frame = heard.frame.clone().ok_or_else(no_event_stop)?;
        if !self.kin.may_be_continued_by(asking.lease.kin()) {
            return Err(other_server_reason().into());
        }
        let told = asking.read_probe(probed).await?;
        self.is_greedy = request::is_greedy(kind, &told);
        let settings = ProbedSettings::from_probe(kind, &told)?;
        match (wish.is_shaped(), settings.has_shape()) {
            (true, true) if settings.is_greedy => return Err("it has a format".to_owned().into()),
            (false, true) => return Err("its server computes with `grammar`".to_owned().into()),
            (true, false) => {
                return Err("its server does not report its grammar".to_owned().into());
            }
            _ => {}
        }
        let marks = match &settings.marks[..] {
            [] => String::new(),
            marks => spelling::read_harmless_marks(
                &asking.ask("/detokenize", spelling::detokenize_request(marks)).await?,
            )?,
        };
        let rendered = match kind {
            AnswerFormat::Chat => {
                Some(spelling::read_rendered(&asking.ask("/apply-template", wish.template_request()).await?)?)
            }
            _ => None,
        };
        if let Some(rendered) = &rendered
            && settings.may_hide_thought(&marks, rendered)
        {
            return Err("its model may have reasoned before that text".to_owned().into());
        }
        let ids = match heard.all_token_ids() {
            Some(ids) => ids.to_vec(),
            None if heard.decode_string().is_empty() => Vec::new(),
            None if spelling::has_marks(heard.decode_string()) => {
                return Err("its text has special tokens of a template".to_owned().into());
            }
            None => {
                let answer = asking.ask("/tokenize", spelling::tokenize_request(heard)).await?;
                let ids = spelling::read_tokens(&answer, heard.decode_string());
                // If the stream reported a token count, the number of tokens must equal it.
                let ids = ids.filter(|ids| heard.counted.is_none_or(|counted| counted == ids.len() as u64));
                ids.ok_or_else(|| "its vocabulary tokenizes that text differently".to_owned())?
            }
        };
        let text = heard.decode_string();
        if let Some(measure) = wish.grammar_test(&settings, rendered.clone(), &ids, text) {
            // A vocabulary that tokenizes the text differently leads to a refusal.
            let is_in_place = match asking.ask("/completion", measure).await {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_canary_is_gone_on_with_by_another_binary_and_by_nothing_else() {
        let kin = |made_of, but_for_binary| AnswerIdentity { made_of, but_for_binary, answer_tokens: None };
        let begun = |by_canary| FirstServer { kin: kin(1, 7), by_canary };
        for by_canary in [false, true] {
            assert!(begun(by_canary).may_be_continued_by(Some(kin(1, 7))));
            assert!(
                !begun(by_canary).may_be_continued_by(Some(kin(2, 8))),
                "another model, or another context"
            );
            assert!(!begun(by_canary).may_be_continued_by(None));
            assert_eq!(begun(by_canary).may_be_continued_by(Some(kin(2, 7))), by_canary);
        }
        let shorter = AnswerIdentity { answer_tokens: Some(5), ..kin(2, 7) };
        assert!(!begun(true).may_be_continued_by(Some(shorter)));
    }
}
