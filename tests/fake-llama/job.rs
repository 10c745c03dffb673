//! Request that holds a slot: its tokens, its fault, its lines in the ledger.
//!
//! Dropping an unfinished job means that the client left: the slot is free at once (for a stream), and the
//! ledger says `cancelled`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use warden_policies::world::SplitMix;

use crate::engine::{Answered, Engine, Slot};
use crate::goes_on::token_id;
use crate::leak::Units;
use crate::ledger::Begun;
use crate::script::{Fault, StreamHead, What};
use crate::shape::Facts;
use crate::slots::Kept;
use crate::wire::Wire;
use crate::{dirty, signals};
use warden_rig::words::Key;

#[derive(Debug)]
pub(crate) enum Step {
    Token(String),
    /// The answer is complete, and the slot is free.
    End,
    /// Error answer; sent within the stream if the head was sent.
    Error(Failing),
    /// The connection is broken on purpose; no byte will arrive.
    Sabotaged,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Failing {
    pub(crate) status: u16,
    pub(crate) message: &'static str,
}

impl Failing {
    pub(crate) const COMPUTE: Self = Self { status: 500, message: "Compute error." };

    pub(crate) fn scripted(status: Option<u16>) -> Self {
        Self { status: status.unwrap_or(500), message: "scripted error" }
    }
}

#[derive(Debug)]
pub(crate) struct Job {
    engine: Arc<Engine>,
    slot: Option<Slot>,
    wire: Wire,
    id: String,
    ordinal: u64,
    key: Key,
    said: u64,
    limit: u64,
    fault: Option<Fault>,
    streaming: bool,
    begun: Instant,
    /// Last generated token, which is evaluated with the next one.
    last: Option<String>,
    /// The model ends the answer at once.
    is_silent: bool,
    pub(crate) facts: Facts,
}

pub(crate) struct Plan {
    pub(crate) id: String,
    pub(crate) ordinal: u64,
    pub(crate) key: Key,
    /// Tokens of the answer that the prompt already contains.
    pub(crate) said: u64,
    pub(crate) limit: u64,
    pub(crate) fault: Option<Fault>,
    pub(crate) streaming: bool,
    pub(crate) is_silent: bool,
    pub(crate) facts: Facts,
    pub(crate) images: u64,
    pub(crate) audio: u64,
    pub(crate) begun: Begun,
    /// Tokens of the prompt, if slots keep their content.
    pub(crate) prompt: Vec<u32>,
    pub(crate) asked: Option<usize>,
    /// Beginning of the prompt.
    pub(crate) opening: String,
    /// The slot may reuse what it has.
    pub(crate) reuses: bool,
}

impl Job {
    pub(crate) async fn begin(engine: Arc<Engine>, wire: Wire, plan: Plan) -> Self {
        let slot = engine.slot(plan.ordinal, &plan.prompt, plan.asked).await;
        let busy: Vec<bool> = engine.slots().iter().map(Option::is_some).collect();
        let cached = engine.held.begin(engine.script().kept, slot.index, &plan.prompt, &busy);
        engine.ledger.begun(&plan.id, plan.ordinal, &plan.begun);
        let (told, id, ordinal) = (Arc::clone(&engine), plan.id.clone(), plan.ordinal);
        wire.at_first_byte(move || told.ledger.head(&id, ordinal));
        engine.report.computed();
        let script = engine.script();
        let prompt_tokens = plan.facts.prompt_tokens;
        let units =
            Units { requests: 1, images: plan.images, audio: plan.audio, prompt_tokens, output_tokens: 0 };
        engine.leak.pay(&script, units);
        let largest = engine.largest_prompt.fetch_max(prompt_tokens, Ordering::Relaxed);
        let larger = prompt_tokens.saturating_sub(largest).saturating_mul(script.buffer_kib_per_prompt_token);
        engine.leak.grow(larger.saturating_mul(1024));
        engine.vram.pay(&script, units);
        let kept = script
            .cache_kib_per_prompt_token
            .saturating_mul(prompt_tokens)
            .saturating_add(script.cache_kib_per_request);
        engine.cache.keep(kept.saturating_mul(1024), prompt_tokens);
        engine.prompt_tokens.fetch_add(plan.facts.prompt_tokens, Ordering::Relaxed);
        let now = Answered { key: plan.key, opening: plan.opening };
        let key = engine.meaning(plan.ordinal, slot.index, plan.reuses, now);
        let mut facts = plan.facts;
        facts.slot = slot.index;
        facts.cached = cached;
        Self {
            engine,
            slot: Some(slot),
            wire,
            id: plan.id,
            ordinal: plan.ordinal,
            key,
            said: plan.said,
            limit: plan.limit,
            fault: plan.fault,
            streaming: plan.streaming,
            begun: Instant::now(),
            last: None,
            is_silent: plan.is_silent,
            facts,
        }
    }

    /// Returns true if the head of a stream waits for the first token.
    pub(crate) fn heads_late(&self) -> bool {
        self.engine.script().stream_head == StreamHead::FirstToken
    }

    pub(crate) async fn prompt(&mut self) {
        let script = self.engine.script();
        let evaluated = self.facts.prompt_tokens.saturating_sub(self.facts.cached);
        #[expect(clippy::cast_precision_loss, reason = "prompts are small")]
        let evaluating =
            Duration::from_secs_f64(script.ms_per_prompt_token.max(0.0) * evaluated as f64 / 1000.0);
        self.pause(Duration::from_millis(script.prompt_ms) + evaluating).await;
        self.facts.prompt_ms = self.elapsed_ms();
    }

    /// Returns the next step. Only a token is followed by another step.
    pub(crate) async fn step(&mut self) -> Step {
        let script = self.engine.script();
        if let Some(sabotage) = self.fault_now().await {
            return sabotage;
        }
        if self.is_silent && self.limit > 0 {
            // The token that ends the answer counts.
            (self.facts.tokens, self.facts.by_limit) = (1, false);
            self.end();
            return Step::End;
        }
        if self.facts.tokens >= self.limit {
            self.end();
            return Step::End;
        }
        #[expect(clippy::cast_precision_loss, reason = "ordinals of requests are small")]
        let ms = script.ms_per_token + script.ms_per_token_per_request * self.ordinal as f64;
        self.pause(Duration::from_secs_f64(ms.max(0.0) / 1000.0)).await;
        if self.engine.poisoned.is_set() {
            return Step::Error(Failing::COMPUTE);
        }
        let text = if self.engine.babbles.is_set() {
            "/".to_owned()
        } else {
            self.key.token(self.said + self.facts.tokens, script.token_bytes)
        };
        self.facts.tokens += 1;
        if self.engine.altered.is_set() {
            self.facts.chosen = self.facts.chosen.map(|_| -7.5);
        }
        let before = self.last.replace(text.clone());
        if let (Some(before), Some(slot)) = (before, &self.slot)
            && script.kept != Kept::Nothing
        {
            self.engine.held.push(slot.index, &before);
        }
        self.facts.predicted_ms = (self.elapsed_ms() - self.facts.prompt_ms).max(0.001);
        self.engine.predicted_tokens.fetch_add(1, Ordering::Relaxed);
        self.engine.leak.pay(&script, Units { output_tokens: 1, ..Units::default() });
        Step::Token(text)
    }

    /// Likeliest tokens of each position so far, as llama-server lists them for `n_probs`; `None` without `chances`
    /// in the script.
    pub(crate) fn chances(&self, count: u64) -> Option<Value> {
        let noise = self.engine.script().chances.filter(|_| count > 0)?;
        let mut random = SplitMix::new(self.ordinal);
        let mut position = |index: u64| {
            let top = (0..count).map(|rank| {
                let mut token = self.key.token(self.said + index + 1000 * rank, 0);
                if rank > 0 {
                    token.push_str(&rank.to_string());
                }
                #[expect(clippy::cast_precision_loss, reason = "ranks are small")]
                let logprob = -0.3 - 0.7 * rank as f64 + noise * random.between(-1.0, 1.0);
                json!({ "id": token_id(&token), "token": token, "bytes": [], "logprob": logprob })
            });
            let top: Vec<Value> = top.collect();
            let mut own = top[0].clone();
            own["top_logprobs"] = Value::from(top);
            own
        };
        Some((0..self.facts.tokens).map(&mut position).collect())
    }

    /// Runs the scripted fault if it is due after the present number of tokens.
    async fn fault_now(&mut self) -> Option<Step> {
        let fault = self.fault.take_if(|fault| fault.after_tokens == Some(self.facts.tokens))?;
        // hyper flushes while the body waits, so all tokens so far are sent before the fault.
        tokio::task::yield_now().await;
        match fault.what {
            What::Error => Some(Step::Error(Failing::scripted(fault.status))),
            What::Poison => {
                self.engine.poisoned.set();
                Some(Step::Error(Failing::COMPUTE))
            }
            _ => sabotage(&self.engine, &self.wire, &fault, self.streaming).await.then_some(Step::Sabotaged),
        }
    }

    /// Sleeps; for ever if the process stops or is wedged meanwhile.
    async fn pause(&self, length: Duration) {
        if length > Duration::ZERO {
            tokio::time::sleep(length).await;
        }
        if self.engine.stopping.is_set() || self.engine.wedged.is_set() || self.engine.stalled.is_set() {
            self.engine.hang().await;
        }
    }

    pub(crate) fn is_nullified(&self) -> bool {
        self.engine.nullified.is_set()
    }

    fn elapsed_ms(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() * 1000.0
    }

    fn end(&mut self) {
        if self.slot.take().is_some() {
            self.engine.ledger.ended(&self.id, self.ordinal, true, self.facts.tokens);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        self.engine.ledger.ended(&self.id, self.ordinal, false, self.facts.tokens);
        let late = Duration::from_millis(self.engine.script().cancel_ms);
        if !self.streaming && late > Duration::ZERO && tokio::runtime::Handle::try_current().is_ok() {
            // llama-server notices late that a non-streaming client has left.
            self.engine.tasks.spawn(async move {
                tokio::time::sleep(late).await;
                drop(slot);
            });
        }
    }
}

/// Applies a fault to the process or the connection; returns true if no valid answer can be sent any more.
pub(crate) async fn sabotage(engine: &Engine, wire: &Wire, fault: &Fault, mid_stream: bool) -> bool {
    if let Some(line) = &fault.says {
        crate::say::err(line);
    }
    match fault.what {
        What::Nothing
        | What::Error
        | What::Poison
        | What::Babble
        | What::Mute
        | What::Silence
        | What::Nullify
        | What::Alter => false,
        What::Crash if fault.ms > 0 => {
            let (after, signal) = (Duration::from_millis(fault.ms), fault.signal.unwrap_or(6));
            engine.tasks.spawn(async move {
                tokio::time::sleep(after).await;
                signals::die_by(signal).await;
            });
            std::future::pending().await
        }
        What::Crash => {
            signals::die_by(fault.signal.unwrap_or(6)).await;
            true
        }
        What::Hang => {
            engine.wedged.set();
            if fault.silent_health {
                engine.wedged_health.set();
            }
            engine.hang().await;
            true
        }
        What::Wedge => {
            engine.stalled.set();
            false
        }
        What::Stall => {
            tokio::time::sleep(Duration::from_millis(fault.ms)).await;
            false
        }
        What::Refuse => {
            engine.refusing.set();
            false
        }
        What::Close => {
            wire.cut();
            true
        }
        dirty => {
            if let Some(bytes) = dirty::bytes(dirty, mid_stream) {
                wire.replace(bytes);
            }
            true
        }
    }
}
