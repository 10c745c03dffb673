//! Evaluates the remaining prompts after the gate has opened, while no request runs in the process. The
//! latest conversation comes first, and only empty slots are used. Requests wait for at most one piece of a
//! prompt.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::warmth::{ColdReason, PromptPieces, WarmthReport};

use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::lease::turns::KeptConversation;
use crate::process::slot_talk::{self, TouchResult};
use crate::process::{BackendProcess, touch};

const QUIET_POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct GateWarmer {
    pub(crate) process: Arc<dyn BackendProcess>,
    pub(crate) leases: Arc<LeaseQueue>,
    pub(crate) from: GenerationId,
    pub(crate) to: GenerationId,
    /// Slots with restored contents, which must not be overwritten.
    pub(crate) used_slots: Vec<u32>,
    pub(crate) restored: Vec<Arc<KeptConversation>>,
    /// Slots with a partly evaluated prompt; available until a request uses them.
    pub(crate) begun_slots: Vec<u32>,
    pub(crate) timeout: Duration,
}

enum WarmResult {
    Evaluated,
    Cold(ColdReason),
    /// The client has continued the conversation, or the process is gone.
    Gone,
}

impl GateWarmer {
    pub(crate) async fn run(mut self) -> WarmthReport {
        let begun = Instant::now();
        let until = clock::after(begun, warden_policies::defaults().warmth.behind_gate);
        let mut warmth = WarmthReport::default();
        let mut tried: Vec<Arc<KeptConversation>> = Vec::new();
        // Wait until the gate has opened: before that, it looks like a closed gate.
        while !self.leases.is_open(self.to) && self.process.is_running() && Instant::now() < until {
            tokio::time::sleep(QUIET_POLL_INTERVAL).await;
        }
        loop {
            let Some(kept) = self.next_conversation(&tried) else {
                // Requests that still run in the old process leave conversations to warm.
                if self.leases.in_flight(self.from) > 0
                    && self.leases.is_open(self.to)
                    && Instant::now() < until
                {
                    tokio::time::sleep(QUIET_POLL_INTERVAL).await;
                    continue;
                }
                break;
            };
            let done = match tokio::time::timeout_at(until, self.warm_one(&kept)).await {
                Ok(done) => done,
                Err(_) => WarmResult::Cold(ColdReason::Time),
            };
            match done {
                WarmResult::Evaluated => {
                    self.leases.turns.move_conversation(&kept, self.to);
                    warmth.evaluated += 1;
                }
                WarmResult::Cold(why) => warmth.count_cold(why, 1),
                WarmResult::Gone => {}
            }
            tried.push(kept);
        }
        warmth.conversations = tried.len() as u64;
        warmth.evaluate_ms = clock::millis(begun.elapsed());
        warmth
    }

    /// Latest conversation of the old process that this process lacks and can evaluate.
    fn next_conversation(&self, tried: &[Arc<KeptConversation>]) -> Option<Arc<KeptConversation>> {
        let all = self.leases.turns.conversations_of(self.from);
        all.into_iter()
            .filter(|kept| kept.turn.body.is_some())
            .find(|kept| !tried.iter().chain(&self.restored).any(|known| Arc::ptr_eq(known, kept)))
    }

    /// True if the client has not continued the conversation.
    fn is_waiting(&self, kept: &Arc<KeptConversation>) -> bool {
        self.leases.turns.conversations_of(self.from).iter().any(|known| Arc::ptr_eq(known, kept))
    }

    async fn warm_one(&mut self, kept: &Arc<KeptConversation>) -> WarmResult {
        if !self.wait_quiet(kept).await {
            return WarmResult::Gone;
        }
        let Some(tokens) = self.tokenize(kept).await else { return WarmResult::Cold(ColdReason::Refused) };
        let Some(slot) = self.empty_slot().await else { return WarmResult::Cold(ColdReason::Slots) };
        self.used_slots.push(slot);
        let mut pieces = PromptPieces::new(warden_policies::defaults().warmth.piece);
        let mut done = 0;
        let mut requests = self.answered_requests();
        while done < tokens.len() {
            if !self.wait_quiet(kept).await {
                return WarmResult::Gone;
            }
            if requests != self.answered_requests() {
                requests = self.answered_requests();
                if !self.slot_holds(slot, done).await {
                    // A client's request uses the slot now.
                    return WarmResult::Cold(ColdReason::Slots);
                }
            }
            let size = usize::try_from(pieces.size()).unwrap_or(usize::MAX);
            let end = done.saturating_add(size).min(tokens.len());
            let body = json!({
                "prompt": tokens[..end], "n_predict": 0, "cache_prompt": true, "stream": true, "id_slot": slot
            });
            let begun = Instant::now();
            let body = body.to_string().into_bytes();
            match slot_talk::touch(self.process.as_ref(), "/completion", body, self.timeout).await {
                TouchResult::Counted(_, evaluated) => pieces.record_time(evaluated.max(1), begun.elapsed()),
                TouchResult::Refused => return WarmResult::Cold(ColdReason::Refused),
                TouchResult::Silent => return WarmResult::Gone,
            }
            done = end;
        }
        WarmResult::Evaluated
    }

    /// Waits until no request has run for a while. Returns false if the conversation needs no warming.
    async fn wait_quiet(&self, kept: &Arc<KeptConversation>) -> bool {
        let least = warden_policies::defaults().warmth.quiet_for;
        loop {
            if !self.process.is_running() || !self.leases.is_open(self.to) || !self.is_waiting(kept) {
                return false;
            }
            let idle = self.leases.idle_since(self.to).is_some_and(|since| since.elapsed() >= least);
            if idle && self.leases.waiting() == 0 {
                return true;
            }
            tokio::time::sleep(QUIET_POLL_INTERVAL).await;
        }
    }

    /// Tokens of the prompt and its answer, from the process's tokenizer.
    async fn tokenize(&self, kept: &KeptConversation) -> Option<Vec<Value>> {
        let request = kept.turn.body.as_ref()?;
        let mut said = &kept.turn.said;
        let prompt = loop {
            let body = touch::touch_body(request, said, None)?;
            let asked: Value = serde_json::from_slice(&body).ok()?;
            if let Some(prompt) = asked.get("prompt") {
                break prompt.clone();
            }
            if let Some(mut answer) =
                slot_talk::post_json(self.process.as_ref(), "/apply-template", body, self.timeout).await
            {
                break answer["prompt"].take();
            }
            if *said == touch::AnswerText::Nothing {
                return None;
            }
            said = &touch::AnswerText::Nothing;
        };
        match prompt {
            Value::Array(tokens) if tokens.iter().all(Value::is_u64) => Some(tokens),
            Value::String(text) => {
                let body = json!({ "content": text, "add_special": true, "parse_special": true });
                let body = body.to_string().into_bytes();
                let mut answer =
                    slot_talk::post_json(self.process.as_ref(), "/tokenize", body, self.timeout).await?;
                match answer["tokens"].take() {
                    Value::Array(tokens) if !tokens.is_empty() => Some(tokens),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn answered_requests(&self) -> u64 {
        self.leases.with_state(|queue| queue.table.cell(self.to).map_or(0, |cell| cell.work().requests))
    }

    async fn slot_holds(&self, slot: u32, tokens: usize) -> bool {
        let Some(told) = slot_talk::list_slots(self.process.as_ref(), self.timeout).await else {
            return false;
        };
        let found = told.iter().find(|told| told.facts.id == slot);
        found.is_some_and(|told| !told.facts.busy && told.facts.tokens == Some(tokens as u64))
    }

    async fn empty_slot(&self) -> Option<u32> {
        let told = slot_talk::list_slots(self.process.as_ref(), self.timeout).await?;
        let nobody_came = self.answered_requests() == 0;
        let is_free = |slot: &slot_talk::ReportedSlot| {
            slot.is_empty || (nobody_came && !slot.facts.busy && self.begun_slots.contains(&slot.facts.id))
        };
        let empty = told.iter().find(|slot| is_free(slot) && !self.used_slots.contains(&slot.facts.id));
        empty.map(|slot| slot.facts.id)
    }
}
