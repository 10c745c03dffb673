//! A streamed answer whose server died in the middle of it: another server computes the rest, and the client sees one stream.
//!
//! ```text
//!   transcript (what the client has) --+
//!   request (as it went to the dead) --+--> probe: what does the next server make of the request?
//!                                      |      | a grammar, marks, thoughts, another build: the stream ends with an error
//!                                      +--> chat: its prompt, rendered there --> tokens of what was delivered
//!                                             |
//!                                             v
//!                            the prompt and those tokens, for the rest --> voice --> the client
//! ```
//!
//! When in doubt, the error: half of one answer and an unrelated second half must be impossible. Therefore the next server has
//! the same command, binary and files as the dead one, all of the request is understood, and the server counts as many tokens of
//! prompt as are meant.

mod request;
mod transcript;
mod voice;

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use hyper::body::Incoming;
use tokio::time::{Instant, timeout_at};

use self::request::{Settings, Why, Wish};
pub(crate) use self::transcript::{Stage, Transcript};
pub(crate) use self::voice::{DONE, Voice};
use crate::answer::assemble::{Kind, is_events};
use crate::backend::again::Again;
use crate::backend::attempts::{Attempts, Backend, Relayed};
use crate::backend::backends::{BackendLease, BoxFuture};
use crate::backend::message::Message;
use crate::backend::upstream_conn::{Partial, UpstreamConn};
use crate::observe::{Outcome, Record};
use crate::refusal::Refusal;

/// Bytes of an answer to one of our own questions beside what it repeats: settings, tokens, a prompt.
const ANSWER: usize = 64 * 1024;

/// Bytes of the answer for each byte of the question: a token comes with its number and its piece.
const TIMES: usize = 48;

/// Why a stream ends with an error instead.
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

/// Whether a request wants its counters behind the end of its answer.
pub(crate) fn wants_usage(again: &Again, kind: Kind) -> bool {
    let body = again.message.json().unwrap_or_default();
    Wish::of(kind, &body).map_or(true, |wish| wish.wants_usage)
}

/// What became of the server.
pub(crate) fn in_the_middle(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Revoked => "its process was stopped in the middle of the answer",
        _ => "its process ended in the middle of the answer",
    }
}

/// What a client is told instead of the rest.
pub(crate) fn instead(died: &str, why: &str) -> String {
    format!("{died} (the rest of it cannot be computed elsewhere: {why})")
}

/// Has the rest of an answer computed. `died` is what its client is told if that cannot be.
pub(crate) async fn go_on(
    again: Again,
    heard: Box<Transcript>,
    record: &mut Record,
    dead: Arc<dyn BackendLease>,
    died: Refusal,
) -> Result<(Relayed, Voice), Cut> {
    let outcome = died.outcome();
    let words = format!("model `{}`: {}", again.model, in_the_middle(outcome));
    let gone_on = computed(again, &heard, record, dead, died).await;
    gone_on.map_err(|stop| match stop {
        Stop::Cannot(why) => Cut { outcome, words: instead(&words, &why) },
        Stop::Refused(refusal) => refusal.into(),
    })
}

/// Why there is no rest.
enum Stop {
    Cannot(Why),
    Refused(Refusal),
}

impl From<Why> for Stop {
    fn from(why: Why) -> Self {
        Self::Cannot(why)
    }
}

async fn computed(
    again: Again,
    heard: &Transcript,
    record: &mut Record,
    dead: Arc<dyn BackendLease>,
    died: Refusal,
) -> Result<(Relayed, Voice), Stop> {
    let Again { upstream, model, kind: lease_kind, tokens, limits, message, deadline } = again;
    let kind = heard.kind();
    let Some(frame) = heard.frame.clone() else { return Err("it has no event".to_owned().into()) };
    let Some(body) = message.json() else { return Err("its request is not kept".to_owned().into()) };
    let mut wish = Wish::of(kind, &body)?;
    // Those of a text are drawn again. A client of llama-server's own dialect has the tokens, though not their text.
    if heard.withholds() && (kind == Kind::Native || !wish.stops()) {
        return Err("its last tokens have no text, or stop words may begin there".to_owned().into());
    }
    if heard.text.contains('\u{FFFD}') && heard.ids_of_all().is_none() {
        return Err("its text has bytes that are no characters".to_owned().into());
    }
    let Some(kin) = dead.kin() else {
        return Err("it is not known what its server was started from".to_owned().into());
    };
    // A server with an end of its own would begin to count anew.
    wish.limit = wish.limit.or(kin.answer_tokens);
    let mut attempts = Attempts {
        upstream: &upstream,
        record,
        model: &model,
        kind: lease_kind,
        tokens,
        limits: &limits,
        died: Some(died),
    };
    let lease = attempts.once_more(dead).await.map_err(|refusal| Stop::Refused(attempts.judged(refusal)))?;
    let probe = beside(&message, None, wish.probe(), false)?;
    // With all that holds for a request that a server may have died of: it may have to be alone there.
    let probed = attempts.run(lease, probe, deadline).await.map_err(Stop::Refused)?;
    let Relayed { response, backend: Backend { lease, revoked, mut conn, pool, sent, deadline }, .. } =
        probed;
    if lease.kin() != Some(kin) {
        return Err("the process that follows was started from something else".to_owned().into());
    }
    let mut asking = Asking { attempts, message, lease, revoked, deadline };
    if response.status() != StatusCode::OK {
        let status = response.status();
        return Err(format!("the process that follows answers with {status} when asked for it").into());
    }
    let most = ANSWER + body.len().saturating_mul(TIMES);
    let told = asking.all(&mut conn, response.into_body(), most, sent.whole_print().is_some()).await?;
    pool.put(conn, asking.lease.facts());
    let settings = Settings::of(kind, &told)?;
    let marks = match &settings.marks[..] {
        [] => String::new(),
        marks => request::harmless(&asking.ask("/detokenize", request::detokenize(marks)).await?)?,
    };
    let rendered = match kind {
        Kind::Chat => Some(request::rendered(&asking.ask("/apply-template", wish.template()).await?)?),
        _ => None,
    };
    if let Some(rendered) = &rendered
        && settings.may_hide(&marks, rendered)
    {
        return Err("its model may have thought before it said that".to_owned().into());
    }
    let ids = match heard.ids_of_all() {
        Some(ids) => ids.to_vec(),
        None if heard.text.is_empty() => Vec::new(),
        None if request::has_marks(&heard.text) => {
            return Err("its text has marks of a template".to_owned().into());
        }
        None => {
            let answer = asking.ask("/tokenize", request::tokenize(heard)).await?;
            let ids = request::tokens(&answer, &heard.text);
            // Where the stream counts them, they must be as many.
            let ids = ids.filter(|ids| heard.counted.is_none_or(|counted| counted == ids.len() as u64));
            ids.ok_or_else(|| "its vocabulary spells that text otherwise".to_owned())?
        }
    };
    let rest = wish.rest(&settings, rendered, &ids);
    let path = (kind == Kind::Chat).then_some("/completion");
    let relayed = asking.stream(path, rest).await?;
    let voice = Voice {
        kind,
        frame,
        delivered: ids.len() as u64,
        prompt: settings.prompt,
        text: heard.text.clone(),
        limit: wish.limit,
        wants_usage: wish.wants_usage,
        is_anew: false,
        ended: false,
    };
    Ok((relayed, voice))
}

/// A request of ours with the head of the client's.
fn beside(
    message: &Message,
    path: Option<&'static str>,
    body: Vec<u8>,
    streams: bool,
) -> Result<Message, Why> {
    let beside = message.beside(path, Bytes::from(body), streams);
    beside.ok_or_else(|| "no more of requests may be held now".to_owned())
}

/// The next server, and what is asked there.
struct Asking<'a> {
    attempts: Attempts<'a>,
    message: Box<Message>,
    lease: Arc<dyn BackendLease>,
    revoked: BoxFuture<'static, ()>,
    deadline: Instant,
}

impl Asking<'_> {
    /// What comes of it, unless the lease or the time ends first: neither says anything against that server.
    async fn within<T>(&mut self, future: impl Future<Output = T>) -> Result<T, Stop> {
        tokio::select! {
            biased;
            done = timeout_at(self.deadline, future) => done.map_err(|_| {
                Stop::Cannot("the whole would take longer than `upstream.exchange_timeout`".to_owned())
            }),
            () = &mut self.revoked => {
                if let Some(print) = self.message.sent().print() {
                    self.lease.lost(print);
                }
                Err(Stop::Cannot("the process that followed was stopped, too".to_owned()))
            }
        }
    }

    /// All of an answer.
    async fn all(
        &mut self,
        conn: &mut UpstreamConn,
        body: Incoming,
        limit: usize,
        is_sent: bool,
    ) -> Result<Vec<u8>, Stop> {
        self.within(conn.all(body, limit)).await?.map_err(|part| match part {
            Partial::Broken => self.broke(is_sent),
            Partial::TooLong => {
                Stop::Cannot("the process that follows answers with more than is held".to_owned())
            }
        })
    }

    /// The connection broke: the server may have died of what it was asked.
    fn broke(&self, whole: bool) -> Stop {
        if let Some(print) = self.message.sent().print().filter(|_| whole) {
            self.lease.broke(print);
        }
        self.lease.doubt();
        Stop::Cannot("the process that followed ended, too".to_owned())
    }

    /// The answer to a question.
    async fn ask(&mut self, path: &'static str, body: Vec<u8>) -> Result<Vec<u8>, Stop> {
        let limit = ANSWER + body.len().saturating_mul(TIMES);
        let mut message = beside(&self.message, Some(path), body, false)?;
        let lease = self.lease.clone();
        let Attempts { upstream, .. } = self.attempts;
        let asked = self.within(Attempts::once(upstream, &lease, &mut message)).await?;
        let Ok((response, mut conn, pool)) = asked else {
            return Err(self.broke(message.sent().is_whole()));
        };
        if response.status() != StatusCode::OK {
            return Err(format!("its build answers {path} with {}", response.status()).into());
        }
        let answer = self.all(&mut conn, response.into_body(), limit, true).await?;
        pool.put(conn, lease.facts());
        Ok(answer)
    }

    /// The stream that is the rest.
    async fn stream(mut self, path: Option<&'static str>, body: Vec<u8>) -> Result<Relayed, Stop> {
        let mut message = beside(&self.message, path, body, true)?;
        let lease = self.lease.clone();
        let Attempts { upstream, .. } = self.attempts;
        let asked = self.within(Attempts::once(upstream, &lease, &mut message)).await?;
        let Ok((response, conn, pool)) = asked else {
            return Err(self.broke(message.sent().is_whole()));
        };
        if response.status() != StatusCode::OK || !is_events(response.headers()) {
            let status = response.status();
            return Err(format!("the process that follows answers with {status} and no stream").into());
        }
        let Self { lease, revoked, deadline, .. } = self;
        let sent = message.sent();
        let backend = Backend { lease, revoked, conn, pool, sent, deadline };
        Ok(Relayed { response, backend, kept: None })
    }
}
