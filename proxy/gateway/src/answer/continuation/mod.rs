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
//! In doubt the stream ends with an error: half of one answer followed by an unrelated second half must be
//! impossible. Therefore a server that is given tokens has the same command, binary and files as the dead
//! one. All of the request is understood, and the server counts the expected number of prompt tokens. The
//! answer to a repeated request must begin with the text that the client has.

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

use warden_policies::Work;
use warden_supervisor::Kin;

use self::asking::{Asking, Probed, beside};
use self::prefill::Prefill;
pub(crate) use self::repeat::Repeat;
use self::repeat::{Draw, Shift};
use self::request::{Settings, Why, Wish};
use self::rest::Rest;
pub(crate) use self::transcript::{Stage, Transcript};
pub(crate) use self::voice::{DONE, Voice};
use crate::answer::assemble::Kind;
use crate::backend::again::{Again, Search};
use crate::backend::attempts::{Attempts, Backend, Relayed};
use crate::backend::backends::BackendLease;
use crate::observe::{Outcome, Record};
use crate::refusal::Refusal;

/// Bytes allowed in the answer to one of our questions, apart from what it repeats: settings, tokens, a
/// prompt.
const ANSWER: usize = 64 * 1024;

/// Bytes of the answer for each byte of the question: a token is listed with its number and its piece.
const TIMES: usize = 48;

/// Error with which a stream ends instead.
#[derive(Debug)]
pub(crate) struct Cut {
    pub(crate) outcome: Outcome,
    pub(crate) words: String,
}

impl From<Refusal> for Cut {
    fn from(refusal: Refusal) -> Self {
        Self { outcome: refusal.outcome(), words: refusal.to_string() }
    }
}

/// Returns whether a request asks for usage counters after the end of its answer.
pub(crate) fn wants_usage(again: &Again) -> bool {
    let body = again.message.json().unwrap_or_default();
    let body = serde_json::from_slice::<serde_json::Value>(&body);
    body.map_or(true, |body| body["stream_options"]["include_usage"] == true)
}

/// Returns whether the request has a single answer, so that its end can be recognised.
pub(crate) fn is_one(again: &Again, heard: &Transcript) -> bool {
    again.message.json().is_some_and(|body| repeat::is_one(heard.kind(), &body).is_ok())
}

/// Describes the end of the server in words.
pub(crate) fn in_the_middle(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Revoked => "its process was stopped in the middle of the answer",
        _ => "its process ended in the middle of the answer",
    }
}

/// Error text for the client in place of the rest.
pub(crate) fn instead(died: &str, why: &str) -> String {
    format!("{died} (the rest of it cannot be computed elsewhere: {why})")
}

/// Has the rest of an answer computed. `died` is the client's error text if that fails; `paid` is the work
/// already delivered.
pub(crate) async fn go_on(
    again: Again,
    heard: Box<Transcript>,
    record: &mut Record,
    dead: Arc<dyn BackendLease>,
    died: Refusal,
    paid: Work,
) -> Result<(Relayed, Voice), Cut> {
    let outcome = died.outcome();
    let words = format!("model `{}`: {}", again.search.model, in_the_middle(outcome));
    let gone_on = computed(again, *heard, record, dead, died, paid).await;
    gone_on.map_err(|stop| match stop {
        Stop::Cannot(why) | Stop::Over(why) => Cut { outcome, words: instead(&words, &why) },
        Stop::Refused(refusal) => refusal.into(),
    })
}

/// Reasons to stop a continuation.
enum Stop {
    /// This way is impossible; another one may work.
    Cannot(Why),
    /// No way works.
    Over(Why),
    Refused(Refusal),
}

impl From<Why> for Stop {
    fn from(why: Why) -> Self {
        Self::Cannot(why)
    }
}

async fn computed(
    again: Again,
    heard: Transcript,
    record: &mut Record,
    dead: Arc<dyn BackendLease>,
    died: Refusal,
    paid: Work,
) -> Result<(Relayed, Voice), Stop> {
    let Again { search, message } = again;
    let Search { upstream, progress, model, kind: lease_kind, tokens, limits, deadline } = search;
    let kind = heard.kind();
    let Some(body) = message.json() else { return Err(Stop::Over("its request is not kept".to_owned())) };
    repeat::is_one(kind, &body).map_err(Stop::Over)?;
    let may_repeat = if heard.is_blank() { Ok(Draw::Same) } else { repeat::may_repeat(kind, &body) };
    let kin = dead.kin().map(|kin| Begun { kin, by_canary: dead.is_canary() });
    let prefill = match kin {
        Some(_) => Prefill::of(&heard, &body),
        None => Err("it is not known what its server was started from".to_owned()),
    };
    let all = |why: Why, nor: Why, nor_text: Why| {
        Stop::Over(format!("{why}; and sent once more, {nor}; and as the beginning of a message, {nor_text}"))
    };
    let planned = Plan::of(&heard, &body, kin, &may_repeat);
    if let (Err(why), Err(nor), Err(nor_text)) = (&planned, &may_repeat, &prefill) {
        return Err(all(why.clone(), nor.clone(), nor_text.clone()));
    }
    let mut attempts = Attempts {
        upstream: &upstream,
        record,
        progress: &progress,
        model: &model,
        kind: lease_kind,
        tokens,
        // The request was admitted before, and its process is restarted anyway.
        loads: true,
        limits: &limits,
        // The death of a canary is not reported to the client.
        died: (!dead.is_canary()).then_some(died),
        patience: Duration::ZERO,
    };
    let lease = attempts.once_more(dead).await.map_err(|refusal| Stop::Refused(attempts.judged(refusal)))?;
    let repeat = |heard| Repeat::of(heard, paid).map(Voice::Repeat).ok_or_else(no_event);
    // If the server's own settings decide, ask for them, provided that there is another way.
    let asks_first = may_repeat == Ok(Draw::Default) && prefill.is_ok();
    if planned.is_err() && may_repeat.is_ok() && !asks_first {
        let voice = repeat(heard)?;
        let relayed = attempts.run(lease, message, deadline).await.map_err(Stop::Refused)?;
        return Ok((relayed, voice));
    }
    let probe = match &planned {
        Ok(plan) => beside(&message, None, plan.wish.probe(), false)?,
        Err(_) => beside(&message, Some("/completion"), Prefill::settings(), false)?,
    };
    // All rules for a suspect request apply: it may have to run alone there.
    let probed = attempts.run(lease, Box::new(probe), deadline).await.map_err(Stop::Refused)?;
    let Relayed { response, backend, .. } = probed;
    let Backend { lease, revoked, conn, pool, sent, deadline, .. } = *backend;
    let mut asking = Asking { attempts, message, lease, revoked, deadline };
    let probed = (response, (conn, sent.whole_print().is_some()), pool);
    let (why, nor, settings) = match planned {
        Ok(mut plan) => match plan.rest(&mut asking, &heard, probed).await {
            Ok((path, rest, voice)) => return Ok((asking.stream(path, rest).await?, Voice::Rest(voice))),
            Err(Stop::Cannot(why)) => match may_repeat.and_then(|draw| draw.known(plan.is_greedy)) {
                Ok(()) => {
                    let voice = repeat(heard)?;
                    return Ok((asking.stream(None, body.to_vec()).await?, voice));
                }
                Err(nor) => (why, nor, None),
            },
            Err(stop) => return Err(stop),
        },
        Err(why) => {
            let settings = match asking.answer(probed).await {
                // The probe's answer is unusable; continue without it.
                Err(Stop::Cannot(_)) => Vec::new(),
                told => told?,
            };
            let is_greedy = Prefill::is_greedy(&settings).ok();
            match may_repeat.and_then(|draw| draw.known(is_greedy)) {
                // The comparison covers what the build does not report.
                Ok(()) => {
                    let voice = repeat(heard)?;
                    return Ok((asking.stream(None, body.to_vec()).await?, voice));
                }
                Err(nor) => (why, nor, Some(settings)),
            }
        }
    };
    let said = match prefill {
        Ok(_) if !kin.is_some_and(|kin| kin.goes_on_by(asking.lease.kin())) => Err(another().into()),
        Ok(prefill) => behind_its_text(&mut asking, &prefill, settings, kin.map(|kin| kin.kin)).await,
        Err(nor_text) => Err(Stop::Cannot(nor_text)),
    };
    match said {
        Ok((rest, shift)) => {
            let voice = Repeat::behind(heard, paid, shift).map(Voice::Repeat).ok_or_else(no_event)?;
            Ok((asking.stream(None, rest).await?, voice))
        }
        Err(Stop::Cannot(nor_text)) => Err(all(why, nor, nor_text)),
        Err(stop) => Err(stop),
    }
}

/// Builds the request for the rest after a text, if the next server shows that it continues there.
/// `settings`: the server's settings, if already known. They are asked for before the prompt, because the
/// question would take its slot.
async fn behind_its_text(
    asking: &mut Asking<'_>,
    prefill: &Prefill,
    settings: Option<Vec<u8>>,
    kin: Option<Kin>,
) -> Result<(Vec<u8>, Shift), Stop> {
    let settings = match settings {
        Some(settings) => settings,
        None => asking.ask("/completion", Prefill::settings()).await?,
    };
    Prefill::is_greedy(&settings)?;
    let tokens = spelling::counted(&asking.ask("/tokenize", spelling::count(&prefill.text)).await?)?;
    let rest = prefill.rest(tokens, kin.and_then(|kin| kin.answer_tokens))?;
    let first = prefill.counted(&asking.ask_again(prefill.first()).await?)?;
    let mut before = None;
    for text in prefill.steps(first.prompt, tokens) {
        let spelled = if text == prefill.text {
            tokens
        } else {
            spelling::counted(&asking.ask("/tokenize", spelling::count(text)).await?)?
        };
        let now = prefill.counted(&asking.ask_again(prefill.second(text)).await?)?;
        Prefill::shows(&first, before.as_ref(), &now, (text, spelled))?;
        before = Some(now);
    }
    Ok((rest, Prefill::shift(&first, tokens)))
}

/// Identity of the server that began an answer.
#[derive(Clone, Copy)]
struct Begun {
    kin: Kin,
    /// The server was a canary.
    by_canary: bool,
}

impl Begun {
    /// Returns whether a server with this identity may compute the rest: it needs the same command, binary
    /// and files.
    ///
    /// The model's own build may also continue the answer of a canary, which differs in the binary alone.
    /// Both have the same vocabulary. The own build computes the rest from the prompt as it renders it and
    /// from exactly the text that the client has, so the whole is an answer that this build might have
    /// given.
    fn goes_on_by(self, next: Option<Kin>) -> bool {
        let Some(next) = next else { return false };
        next == self.kin
            || self.by_canary
                && (next.but_for_binary, next.answer_tokens)
                    == (self.kin.but_for_binary, self.kin.answer_tokens)
    }
}

fn another() -> Why {
    "the process that follows was started from something else".to_owned()
}

fn no_event() -> Stop {
    Stop::Over("it has no event".to_owned())
}

/// An answer that can be continued by its tokens, as far as that is known without asking the server.
struct Plan {
    wish: Wish,
    kin: Begun,
    /// The next server gives the same answer to the same request each time.
    is_greedy: Option<bool>,
}

impl Plan {
    fn of(
        heard: &Transcript,
        body: &[u8],
        kin: Option<Begun>,
        may_repeat: &Result<Draw, Why>,
    ) -> Result<Self, Why> {
        let kind = heard.kind();
        heard.is_plain()?;
        let mut wish = Wish::of(kind, body)?;
        if wish.is_shaped() && *may_repeat == Ok(Draw::Same) {
            // The raw answer may have blanks and fences around the text that the client does not have.
            return Err("it has a shape, and can be had to the letter".to_owned());
        }
        // Withheld tokens of a text are drawn again. In llama-server's own dialect the client has those
        // tokens, though not their text.
        if heard.withholds() && (kind == Kind::Native || !wish.stops()) {
            return Err("its last tokens have no text, or stop words may begin there".to_owned());
        }
        if heard.text().contains('\u{FFFD}') && heard.ids_of_all().is_none() {
            return Err("its text has bytes that are no characters".to_owned());
        }
        let Some(kin) = kin else {
            return Err("it is not known what its server was started from".to_owned());
        };
        // A server with its own token limit would begin to count at zero again.
        wish.limit = wish.limit.or(kin.kin.answer_tokens);
        Ok(Self { wish, kin, is_greedy: None })
    }

    /// Returns path and body of the request for the rest, after the server has reported its view of the
    /// client's request.
    async fn rest(
        &mut self,
        asking: &mut Asking<'_>,
        heard: &Transcript,
        probed: Probed,
    ) -> Result<(Option<&'static str>, Vec<u8>, Rest), Stop> {
        let kind = heard.kind();
        let wish = &self.wish;
        let frame = heard.frame.clone().ok_or_else(no_event)?;
        if !self.kin.goes_on_by(asking.lease.kin()) {
            return Err(another().into());
        }
        let told = asking.answer(probed).await?;
        self.is_greedy = request::is_greedy(kind, &told);
        let settings = Settings::of(kind, &told)?;
        match (wish.is_shaped(), settings.has_shape()) {
            (true, true) if settings.is_greedy => return Err("it has a shape".to_owned().into()),
            (false, true) => return Err("its server computes with `grammar`".to_owned().into()),
            (true, false) => {
                return Err("its server does not tell which grammar it computes with".to_owned().into());
            }
            _ => {}
        }
        let marks = match &settings.marks[..] {
            [] => String::new(),
            marks => spelling::harmless(&asking.ask("/detokenize", spelling::detokenize(marks)).await?)?,
        };
        let rendered = match kind {
            Kind::Chat => Some(spelling::rendered(&asking.ask("/apply-template", wish.template()).await?)?),
            _ => None,
        };
        if let Some(rendered) = &rendered
            && settings.may_hide(&marks, rendered)
        {
            return Err("its model may have thought before it said that".to_owned().into());
        }
        let ids = match heard.ids_of_all() {
            Some(ids) => ids.to_vec(),
            None if heard.text().is_empty() => Vec::new(),
            None if spelling::has_marks(heard.text()) => {
                return Err("its text has marks of a template".to_owned().into());
            }
            None => {
                let answer = asking.ask("/tokenize", spelling::tokenize(heard)).await?;
                let ids = spelling::tokens(&answer, heard.text());
                // If the stream counts tokens, the number must match.
                let ids = ids.filter(|ids| heard.counted.is_none_or(|counted| counted == ids.len() as u64));
                ids.ok_or_else(|| "its vocabulary spells that text otherwise".to_owned())?
            }
        };
        let text = heard.text();
        if let Some(measure) = wish.measure(&settings, rendered.clone(), &ids, text) {
            // A vocabulary that tokenizes the text differently leads to a refusal.
            let is_in_place = match asking.ask("/completion", measure).await {
                Ok(answer) => request::is_in_place(&answer),
                Err(Stop::Cannot(_)) => false,
                Err(stop) => return Err(stop),
            };
            if !is_in_place {
                return Err("its build does not put a grammar where that text is".to_owned().into());
            }
        }
        let rest = wish.rest(&settings, rendered, &ids, text);
        let voice = Rest {
            kind,
            frame,
            delivered: ids.len() as u64,
            prompt: settings.prompt,
            text: heard.text().to_owned(),
            limit: wish.limit,
            wants_usage: wish.wants_usage,
            ended: false,
        };
        Ok(((kind == Kind::Chat).then_some("/completion"), rest, voice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_canary_is_gone_on_with_by_another_binary_and_by_nothing_else() {
        let kin = |made_of, but_for_binary| Kin { made_of, but_for_binary, answer_tokens: None };
        let begun = |by_canary| Begun { kin: kin(1, 7), by_canary };
        for by_canary in [false, true] {
            assert!(begun(by_canary).goes_on_by(Some(kin(1, 7))));
            assert!(!begun(by_canary).goes_on_by(Some(kin(2, 8))), "another model, or another context");
            assert!(!begun(by_canary).goes_on_by(None));
            assert_eq!(begun(by_canary).goes_on_by(Some(kin(2, 7))), by_canary);
        }
        let shorter = Kin { answer_tokens: Some(5), ..kin(2, 7) };
        assert!(!begun(true).goes_on_by(Some(shorter)));
    }
}
