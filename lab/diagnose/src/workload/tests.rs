//! Requests of the workloads.

use super::*;

const FACTS: ServerLimits = ServerLimits { slots: 2, n_ctx: Some(4096), tokens_per_word: 1.0 };

fn script(workload: Workload, facts: ServerLimits) -> WorkloadScript {
    WorkloadScript::new(workload, &warden_policies::defaults().diagnose, facts).unwrap()
}

fn text(ask: &LabRequest) -> String {
    ask.body.as_ref().unwrap()["messages"][0]["content"].as_str().unwrap_or_default().to_owned()
}

fn words(ask: &LabRequest) -> usize {
    text(ask).split(' ').count()
}

#[test]
fn the_same_is_the_same_and_the_distinct_is_distinct() {
    let mut same = script(Workload::ShortText, FACTS);
    assert_eq!(same.next(), same.next());
    let mut distinct = script(Workload::DistinctPrompts, FACTS);
    assert_ne!(text(&distinct.next()[0]), text(&distinct.next()[0]));
}

#[test]
fn every_text_fits_into_the_context() {
    let small = ServerLimits { n_ctx: Some(512), ..FACTS };
    for workload in [Workload::LongText, Workload::PrefillSweep, Workload::DistinctPrompts] {
        let mut script = script(workload, small);
        for _ in 0..50 {
            let ask = script.next().remove(0);
            let answer = ask.body.as_ref().unwrap()["max_tokens"].as_u64().unwrap();
            assert!(words(&ask) as u64 + answer + TEMPLATE_TOKENS <= 512, "{workload}: {}", words(&ask));
        }
    }
}

#[test]
fn a_sweep_begins_with_the_largest_and_reaches_every_size() {
    let mut sweep = script(Workload::PrefillSweep, FACTS);
    let sizes: Vec<usize> = (0..200).map(|_| words(&sweep.next()[0])).collect();
    assert_eq!(sizes.iter().max(), sizes.first());
    let different: std::collections::BTreeSet<usize> = sizes.into_iter().collect();
    assert_eq!(different.len(), warden_policies::defaults().diagnose.sweep.len());
}

#[test]
fn answers_have_all_the_lengths_that_are_wanted() {
    let mut lengths = script(Workload::OutputLengths, FACTS);
    let asked = (0..100).map(|_| lengths.next()[0].body.as_ref().unwrap()["max_tokens"].as_u64().unwrap());
    let asked: Vec<u64> = asked.collect();
    assert_eq!(asked[0], 256);
    assert_eq!(asked.into_iter().collect::<std::collections::BTreeSet<_>>(), [1, 16, 64, 256].into());
}

#[test]
fn an_image_comes_after_a_text_of_its_own_so_that_no_cache_has_it() {
    let mut images = script(Workload::SameImage, FACTS);
    let (first, second) = (images.next().remove(0), images.next().remove(0));
    let parts = |ask: &LabRequest| ask.body.as_ref().unwrap()["messages"][0]["content"].clone();
    assert_eq!((first.images, &parts(&first)[1]), (1, &parts(&second)[1]));
    assert_ne!(parts(&first)[0], parts(&second)[0]);
    let mut sizes = script(Workload::ImageSizes, FACTS);
    let urls = (0..60).map(|_| parts(&sizes.next()[0])[1].to_string());
    assert_eq!(
        urls.collect::<std::collections::BTreeSet<_>>().len(),
        warden_policies::defaults().diagnose.images.len()
    );
}

#[test]
fn conversations_grow_on_each_slot_and_begin_anew() {
    let mut all = script(Workload::Conversation, ServerLimits { slots: 3, ..FACTS });
    let mut lengths = Vec::new();
    for _ in 0..30 {
        let asks = all.next();
        assert_eq!(asks.len(), 3);
        let said: std::collections::BTreeSet<String> = asks.iter().map(text).collect();
        assert_eq!(said.len(), 3, "each says something of its own");
        lengths.push(asks[0].body.as_ref().unwrap()["messages"].as_array().unwrap().len());
        let answer = LabAnswer { text: "so".to_owned(), ..LabAnswer::default() };
        all.take_answers(&vec![Some(answer); 3]);
    }
    assert_eq!(lengths[..3], [1, 3, 5]);
    assert!(lengths.iter().filter(|length| **length == 1).count() >= 2, "{lengths:?}");
    // A failed turn ends its conversation.
    all.take_answers(&[None, None, None]);
    let next = all.next();
    assert_eq!(next[0].body.as_ref().unwrap()["messages"].as_array().unwrap().len(), 1);
}
