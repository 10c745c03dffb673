//! Handles working requests: completions, chat, embeddings, transcriptions.
//!
//! ```text
//! parse -> fault on arrival? -> wait for a slot (no byte sent) -> begun -> head -> tokens -> ended
//!                                                                  `- not streaming: head at the end
//! ```

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::StatusCode;
use hyper::body::Frame;
use hyper::header::{HeaderName, HeaderValue};
use hyper::http::request::Parts;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::check;
use crate::engine::Engine;
use crate::goes_on;
use crate::job::{self, Failing, Job, Plan, Step};
use crate::ledger::Begun;
use crate::reply::{Reply, error, full, ok, reply};
use crate::script::{StreamHead, What};
use crate::shape::{Facts, Shape, event};
use crate::slots::{self, Kept};
use crate::wire::Wire;
use warden_rig::words::{Key, count_parts, count_words};

const DIMENSIONS: usize = 16;
/// Characters of a prompt by which conversations differ.
const OPENING: usize = 500;

/// llama-server answers 500 to a body that is not JSON, although the client is at fault.
pub(crate) fn bad_json(wrong: &serde_json::Error) -> Reply {
    error(500, "server_error", &format!("[json.exception.parse_error.101] parse error: {wrong}"))
}

fn failed(failing: Failing) -> Reply {
    error(failing.status, "server_error", failing.message)
}

pub(crate) async fn work(engine: Arc<Engine>, wire: Wire, shape: Shape, head: &Parts, body: Bytes) -> Reply {
    let request = if shape == Shape::Transcription {
        Value::Null
    } else {
        match serde_json::from_slice::<Value>(&body) {
            Ok(value) => value,
            Err(wrong) => return bad_json(&wrong),
        }
    };
    if let Some(field) = shape.required()
        && request.get(field).is_none()
    {
        return error(400, "invalid_request_error", &format!("'{field}' is required"));
    }
    if let Some(why) = check::wrong(shape, &request) {
        return error(400, "invalid_request_error", &why);
    }
    // The fixed prompts of llama-warden do not shift the ordinals of a test's requests.
    let is_probe = request["n_probs"].is_u64() && request["ignore_eos"] == true && request["stream"] == true;
    let ordinal = if is_probe { 0 } else { engine.arrive() };
    let mut fault = engine.fault_for(ordinal, &body);
    let mut is_silent = false;
    if let Some(on_arrival) = fault.take_if(|fault| fault.after_tokens.is_none()) {
        match on_arrival.what {
            What::Error => return failed(Failing::scripted(on_arrival.status)),
            What::Poison => engine.poisoned.set(),
            What::Babble => engine.babbles.set(),
            What::Mute => engine.mute.set(),
            What::Silence => is_silent = true,
            What::Nullify => engine.nullified.set(),
            What::Alter => engine.altered.set(),
            _ => {}
        }
        if job::sabotage(&engine, &wire, &on_arrival, false).await {
            return ok(&Value::Null);
        }
    }
    if engine.wedged.is_set() {
        engine.hang().await;
    }
    if engine.poisoned.is_set() {
        return failed(Failing::COMPUTE);
    }
    is_silent |= engine.mute.is_set() && !is_probe;
    let plan = match plan(&engine, shape, head, &body, &request, ordinal, fault) {
        Ok(plan) if is_silent => Plan { is_silent, ..plan },
        Ok(plan) => plan,
        Err(why) => return error(400, "invalid_request_error", &why),
    };
    let streaming = plan.streaming;
    let (key, tells) = (plan.key, request["verbose"] == true);
    let top = request["n_probs"].as_u64().unwrap_or(0);
    let job = Job::begin(Arc::clone(&engine), wire.clone(), plan).await;
    if streaming {
        let include_usage = request["stream_options"]["include_usage"].as_bool().unwrap_or(false);
        return streamed(job, shape, include_usage, wire, &engine).await;
    }
    whole(job, shape, key, &body, (tells, top)).await
}

fn plan(
    engine: &Engine,
    shape: Shape,
    head: &Parts,
    body: &Bytes,
    request: &Value,
    ordinal: u64,
    fault: Option<crate::script::Fault>,
) -> Result<Plan, String> {
    let begun = match shape {
        Shape::Native | Shape::Text => Some(goes_on::begun(request)?),
        _ => None,
    };
    let said = begun.as_ref().map_or(0, |begun| begun.said);
    let key = match &begun {
        Some(begun) => begun.key,
        None if shape == Shape::Transcription => Key::of_bytes(body),
        None => Key::of(request),
    };
    let asked =
        ["max_completion_tokens", "max_tokens", "n_predict"].iter().find_map(|name| request[*name].as_u64());
    let generates = shape.streams();
    let limit = if generates { engine.script().tokens_for(asked) } else { 0 };
    let header = head.headers.get("x-request-id").and_then(|value| value.to_str().ok());
    let named = begun.as_ref().and_then(|begun| begun.id.as_deref()).or(request["user"].as_str()).or(header);
    let mut id = named.unwrap_or("-").to_owned();
    if request["verbose"] == true {
        // A request that asks only for an analysis is not executed.
        id.push('?');
    }
    let parts = ["input_prefix", "input_suffix", "input_extra"].map(|field| request[field].clone());
    let parts = Value::from(parts.to_vec());
    let prompt = match shape {
        Shape::Infill => &parts,
        _ => shape.required().map_or(&Value::Null, |field| &request[field]),
    };
    let keeps = engine.script().kept != Kept::Nothing && generates;
    let spelled = if keeps { slots::spelled(request) } else { Vec::new() };
    let asked_slot = request["id_slot"].as_u64().and_then(|slot| usize::try_from(slot).ok());
    Ok(Plan {
        asked: asked_slot,
        id,
        said,
        ordinal,
        key,
        limit,
        fault,
        streaming: generates && request["stream"].as_bool().unwrap_or(false),
        images: count_parts(prompt, "image_url") + count_parts(prompt, "source"),
        audio: count_parts(prompt, "input_audio") + u64::from(shape == Shape::Transcription),
        begun: Begun {
            path: head.uri.path().to_owned(),
            sha256: hex::encode(Sha256::digest(body)),
            meaning: key.long(),
            stream: generates && request["stream"].as_bool().unwrap_or(false),
            head_first: engine.script().stream_head == StreamHead::Slot,
        },
        facts: Facts {
            id: format!("chatcmpl-{}", key.short()),
            model: engine.args.alias.clone(),
            prompt_tokens: match begun {
                _ if !spelled.is_empty() => spelled.len() as u64,
                Some(begun) => begun.words + said,
                None => count_words(prompt),
            },
            cached: 0,
            tokens: 0,
            by_limit: asked == Some(limit),
            slot: 0,
            prompt_ms: 0.0,
            predicted_ms: 0.0,
            chosen: request["n_probs"].is_u64().then_some(-0.1),
        },
        is_silent: false,
        prompt: spelled,
        opening: prompt.as_str().unwrap_or_default().chars().take(OPENING).collect(),
        reuses: request["cache_prompt"] != false,
    })
}

async fn whole(mut job: Job, shape: Shape, key: Key, body: &Bytes, (tells, top): (bool, u64)) -> Reply {
    job.prompt().await;
    let mut text = String::new();
    loop {
        match job.step().await {
            Step::Token(token) => text.push_str(&token),
            Step::End => break,
            Step::Error(failing) => return failed(failing),
            Step::Sabotaged => return ok(&Value::Null),
        }
    }
    let facts = &job.facts;
    let embedding =
        if job.is_nullified() { json!(vec![Value::Null; DIMENSIONS]) } else { json!(key.vector(DIMENSIONS)) };
    match shape {
        Shape::Embeddings => ok(&json!({
            "object": "list", "model": facts.model,
            "data": [{"object": "embedding", "index": 0, "embedding": embedding}],
            "usage": {"prompt_tokens": facts.prompt_tokens, "total_tokens": facts.prompt_tokens},
        })),
        Shape::Transcription => ok(
            &json!({"text": format!("{} bytes, sha256 {}", body.len(), hex::encode(Sha256::digest(body)))}),
        ),
        Shape::Chat | Shape::Text | Shape::Native | Shape::Infill | Shape::Messages => {
            let mut whole = shape.whole(facts, &text);
            if let Some(chances) = job.chances(top).filter(|_| shape == Shape::Native) {
                whole["completion_probabilities"] = chances;
            }
            if tells {
                whole["__verbose"] = json!({ "generation_settings": goes_on::settings(), "tokens_evaluated": facts.prompt_tokens, "content": text });
            }
            ok(&whole)
        }
    }
}

enum At {
    Opening,
    /// The prompt is done, and this text follows a head that is only sent now.
    Late {
        text: String,
        over: bool,
    },
    Tokens,
    Over,
}

/// Computation of the next text, with the state after it.
type Next = Pin<Box<dyn Future<Output = Option<(String, Job, At)>> + Send>>;

/// State of a stream between two polls.
enum Now {
    Due(Box<Job>, At),
    Computing(Next),
}

async fn streamed(
    mut job: Job,
    shape: Shape,
    include_usage: bool,
    wire: Wire,
    engine: &Arc<Engine>,
) -> Reply {
    let mut begin = At::Opening;
    if job.heads_late() {
        job.prompt().await;
        let mut text = shape.opening(&job.facts);
        let over = match job.step().await {
            Step::Token(token) => {
                text.push_str(&shape.token(&job.facts, &token));
                false
            }
            Step::End => {
                text.push_str(&shape.closing(&job.facts, include_usage));
                true
            }
            Step::Error(failing) => return failed(failing),
            Step::Sabotaged => return ok(&Value::Null),
        };
        begin = At::Late { text, over };
    }
    let ping = engine.script().ping_ms;
    let engine = Arc::clone(engine);
    // hyper pulls the events, so a client that leaves drops the body, and with it the job.
    let events = stream::unfold(Now::Due(Box::new(job), begin), move |now| {
        let (wire, engine) = (wire.clone(), Arc::clone(&engine));
        async move {
            let mut next: Next = match now {
                Now::Due(job, at) => Box::pin(say(*job, at, shape, include_usage, wire)),
                Now::Computing(next) => next,
            };
            let said = if ping == 0 {
                next.await
            } else {
                match tokio::time::timeout(Duration::from_millis(ping), &mut next).await {
                    Ok(said) => said,
                    Err(_) if engine.stopping.is_set() || engine.wedged.is_set() => next.await,
                    Err(_) => {
                        let comment = Frame::data(Bytes::from_static(b":\n\n"));
                        return Some((Ok::<_, Infallible>(comment), Now::Computing(next)));
                    }
                }
            };
            let (text, job, at) = said?;
            Some((Ok(Frame::data(Bytes::from(text))), Now::Due(Box::new(job), at)))
        }
    });
    let body = StreamBody::new(events).map_err(|never| -> io::Error { match never {} }).boxed_unsync();
    let mut reply = reply(StatusCode::OK, "text/event-stream", full(""));
    reply.headers_mut().insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    reply.map(|_| body)
}

async fn say(
    mut job: Job,
    at: At,
    shape: Shape,
    include_usage: bool,
    wire: Wire,
) -> Option<(String, Job, At)> {
    let mut text = String::new();
    match at {
        At::Opening => {
            job.prompt().await;
            text = shape.opening(&job.facts);
        }
        At::Late { text, over } => return Some((text, job, if over { At::Over } else { At::Tokens })),
        At::Tokens => {}
        At::Over => {
            // llama-server closes the connection after a stream, although its head promised keep-alive.
            wire.close_after_answer();
            return None;
        }
    }
    let at = match job.step().await {
        Step::Token(token) => {
            text.push_str(&shape.token(&job.facts, &token));
            At::Tokens
        }
        Step::End => {
            text.push_str(&shape.closing(&job.facts, include_usage));
            At::Over
        }
        Step::Error(Failing { status, message }) => {
            text.push_str(&event(
                &json!({"error": {"message": message, "type": "server_error", "code": status}}),
            ));
            At::Over
        }
        Step::Sabotaged => {
            text.push_str("lost");
            At::Over
        }
    };
    Some((text, job, at))
}
