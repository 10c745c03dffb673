//! Client that sends requests to the model with trained weights, and checks the answers for sentences.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::sleep;
use warden_rig::real_weights::is_sentence;
use warden_rig::storm::{Told, one};
use warden_rig::warden::chat;
use warden_rig::{Http, Trouble};

use crate::clients::Progress;
use crate::instance::TRAINED;

/// Questions that even a small model answers in sentences, each with a word of the first sentence.
const QUESTIONS: [(&str, &str); 3] = [
    ("How many days are in a week?", "week"),
    ("What colour is the sky?", "sky"),
    ("What do bees make?", "Bees"),
];

/// Tokens for more than one sentence.
const TOKENS: u64 = 48;

/// Sends requests until the soak is over; returns the number of sentences.
pub(crate) async fn read_sentences(number: u64, http: Http, progress: Arc<Progress>) -> Result<u64, Trouble> {
    let mut sentences = 0;
    for (turn, (question, word)) in (0_u64..).zip(QUESTIONS.iter().cycle()) {
        if progress.is_over() {
            break;
        }
        let request = chat(&format!("c{number}-{turn}"), TRAINED, question, TOKENS, turn % 2 == 0);
        let was = progress.restarting.load(Ordering::SeqCst);
        let told = one(&http, &request, None).await;
        let restarts = was || progress.restarting.load(Ordering::SeqCst);
        match told {
            Ok(Told::Whole(answer)) if begins_with_sentence(&answer.text, word) => sentences += 1,
            Ok(Told::Refused { nothing_ran: true, .. }) if restarts => {}
            told => return Err(Trouble::new(format!("{question} {told:?}"))),
        }
        progress.ended_one(number);
        sleep(Duration::from_millis(200)).await;
    }
    Ok(sentences)
}

/// Returns true if a text begins with a sentence that contains this word.
fn begins_with_sentence(text: &str, word: &str) -> bool {
    text.split_inclusive(". ").next().is_some_and(|first| is_sentence(first) && first.contains(word))
}
