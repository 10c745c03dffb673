//! One more client: it asks the model with trained weights, whatever is done to it, and reads the answers as sentences.

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

/// Questions that even a small model answers in sentences, and a word of the first one.
const QUESTIONS: [(&str, &str); 3] = [
    ("How many days are in a week?", "week"),
    ("What colour is the sky?", "sky"),
    ("What do bees make?", "Bees"),
];

/// Room for one sentence and more.
const TOKENS: u64 = 48;

/// Asks until the soak is over, as the client of this number. Returns how many sentences were read.
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

/// Whether the first sentence of a text is one, and has this word.
fn begins_with_sentence(text: &str, word: &str) -> bool {
    text.split_inclusive(". ").next().is_some_and(|first| is_sentence(first) && first.contains(word))
}
