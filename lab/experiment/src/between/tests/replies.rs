//! Searches for changed answers in simulated histories, where builds differ in last digits, answer at random,
//! or change answers in up to two revisions.

use super::*;
use warden_policies::defaults::Strictness;

use crate::proof::ReplyToken;

const ALL: usize = 10;

struct Talk {
    place: Place,
    /// Each entry: the revision that changes answers, the changed questions, and the change in nats.
    changes: Vec<(usize, &'static [usize], f64)>,
    /// Jitter of one build's log probabilities between processes.
    jitter: f64,
    /// A question with a random answer, and the probability of that answer.
    coin: Option<(usize, f64)>,
    /// Revisions that refuse question 3.
    refuses: std::ops::Range<usize>,
}

impl Talk {
    fn new(seed: u64) -> Self {
        let place = Place::new(seed);
        let changes = vec![(place.at, &[1, 4][..], 1.5)];
        Self { place, changes, jitter: 0.0, coin: None, refuses: 0..0 }
    }

    fn reply(&mut self, revision: usize, question: usize) -> BuildReply {
        let request = format!("text {question}");
        if question == 3 && self.refuses.contains(&revision) {
            return BuildReply {
                request,
                refused: Some("no (status 500)".to_owned()),
                ..BuildReply::default()
            };
        }
        let own =
            |change: &&(usize, &'static [usize], f64)| revision >= change.0 && change.1.contains(&question);
        let moved: f64 = self.changes.iter().filter(own).map(|change| change.2).sum();
        let random = &mut self.place.random;
        let falls = self.coin.is_some_and(|(own, so)| own == question && random.unit() < so);
        let jitter = self.jitter * random.between(-1.0, 1.0);
        // The likelier answer is given; a large enough shift changes it.
        let yes = -0.1 - moved + jitter;
        let no = -1.4 + moved * 0.1;
        let said = if (yes > no) == falls { "no" } else { "yes" };
        let top = vec![("yes".to_owned(), yes), ("no".to_owned(), no)];
        let token = ReplyToken { text: said.to_owned(), top };
        BuildReply { request, text: said.to_owned(), tokens: vec![token], ..BuildReply::default() }
    }

    fn process(&mut self, ask: ProcessOrder) -> ProcessResult {
        assert_eq!(ask.aim, RevisionAim::Answers);
        if self.place.broken.contains(&ask.revision) {
            return ProcessResult::Cannot("it does not build".to_owned());
        }
        let replies = (0..ALL).map(|question| self.reply(ask.revision, question)).collect();
        ProcessResult::Visit(BuildVisit { measured: Vec::new(), replies })
    }

    fn search(&mut self) -> RevisionConclusion {
        run(RevisionAim::Answers, self.place.last, &mut |ask| self.process(ask))
    }
}

fn found(revision: usize) -> RevisionOutcome {
    RevisionOutcome::Found { revision }
}

#[test]
fn in_a_hundred_histories_the_revision_that_changed_answers_is_found_in_each() {
    for seed in 0..100 {
        let mut talk = Talk::new(seed);
        let told = talk.search();
        assert_eq!(told.outcome, found(talk.place.at), "seed {seed}: {told:#?}");
        assert_eq!(told.ill_is_newer, Some(true));
        let requests = vec!["text 1".to_owned(), "text 4".to_owned()];
        assert_eq!(told.symptom, Some(RevisionSymptom::Answers { requests }));
        assert!(told.judged.iter().filter_map(|one| one.answers.as_ref()).all(|said| !said.is_third()));
        // A build that repeats itself answers each question once.
        assert!(told.legs < 60, "seed {seed}: {} processes", told.legs);
    }
}

#[test]
fn last_digits_and_coins_of_a_build_are_held_against_no_revision() {
    let mut right = 0;
    for seed in 100..200 {
        let mut talk = Talk::new(seed);
        talk.jitter = 0.05;
        talk.coin = Some((7, 0.2 + 0.6 * talk.place.random.unit()));
        let told = talk.search();
        match told.outcome {
            RevisionOutcome::Found { revision } => {
                assert_eq!(revision, talk.place.at, "seed {seed}: {told:#?}");
                right += 1;
            }
            RevisionOutcome::Unsteady { .. } | RevisionOutcome::Among { .. } => {}
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(right >= 98, "{right} of 100");
}

#[test]
fn where_all_that_differs_is_chance_there_is_nothing_to_look_for() {
    for seed in 200..300 {
        let mut talk = Talk::new(seed);
        talk.changes = vec![(talk.place.at, &[2], 0.05)];
        talk.jitter = 0.02;
        assert_eq!(talk.search().outcome, RevisionOutcome::Alike { sure: true }, "seed {seed}");
        talk.coin = Some((7, 0.5));
        let outcome = talk.search().outcome;
        let is_unsure = matches!(outcome, RevisionOutcome::Alike { .. });
        assert!(is_unsure, "seed {seed}: {outcome:?}");
    }
}

#[test]
fn of_two_revisions_that_change_answers_the_first_is_found_and_that_there_are_more_is_told() {
    for seed in 300..400 {
        let mut talk = Talk::new(seed);
        let (first, last) = (talk.place.at, talk.place.last);
        if first == last {
            continue;
        }
        talk.place.broken.retain(|at| *at != last && *at + 1 != last);
        // The second change affects the same question as the first, or another one.
        let (same, other): (&[usize], &[usize]) = (&[1, 4], &[8]);
        let second = first + 1 + usize::try_from(talk.place.random.below((last - first) as u64)).unwrap();
        talk.changes.push((second, if seed % 2 == 0 { same } else { other }, 2.0));
        let told = talk.search();
        assert_eq!(told.outcome, found(first), "seed {seed}, {first} and {second}: {told:#?}");
        let is_told =
            told.judged.iter().any(|one| one.answers.as_ref().is_some_and(RevisionAnswers::is_third));
        assert!(is_told, "seed {seed}: the one that was found is none of the newer end's: {told:#?}");
    }
}

#[test]
fn a_question_that_is_refused_by_one_end_alone_is_a_difference_whichever_it_is() {
    for (refuses, at) in [(20..41, 20), (0..20, 20)] {
        let mut talk = Talk::new(9);
        (talk.place.last, talk.place.broken) = (40, vec![10, 30]);
        (talk.changes, talk.refuses) = (Vec::new(), refuses);
        let told = talk.search();
        assert_eq!(told.outcome, found(at), "{told:#?}");
        assert!(told.differences[0].older.contains("no") || told.differences[0].newer.contains("no"));
    }
}

#[test]
fn whoever_wants_equal_answers_hears_of_each_other_word() {
    let mut talk = Talk::new(11);
    (talk.place.last, talk.place.at, talk.place.broken) = (100, 61, Vec::new());
    // Without changes, predictions are equal but tokens may differ.
    talk.changes = Vec::new();
    let search = |strictness, talk: &mut Talk| {
        let proof = ProofPolicy { answers: strictness, ..warden_policies::defaults().proof.clone() };
        let mut search =
            RevisionSearch::new(JudgingPolicies { proof: &proof, ..rules() }, RevisionAim::Answers, 100);
        loop {
            let ask = match search.next() {
                RevisionStep::Done(told) => return told.outcome,
                RevisionStep::Run(ask) => ask,
            };
            let ProcessResult::Visit(mut visit) = talk.process(ask) else { panic!() };
            if ask.revision >= 61 {
                visit.replies[2].tokens[0].text = "no".to_owned();
                visit.replies[2].text = "no".to_owned();
            }
            search.observe(ask, ProcessResult::Visit(visit));
        }
    };
    assert_eq!(search(Strictness::Equal, &mut talk), found(61));
    assert_eq!(search(Strictness::Near, &mut talk), RevisionOutcome::Alike { sure: true });
}

#[test]
fn a_revision_that_answers_now_so_and_now_so_cannot_be_told() {
    let mut talk = Talk::new(12);
    (talk.place.last, talk.place.at, talk.place.broken) = (64, 40, Vec::new());
    talk.changes = vec![(40, &[1], 1.5)];
    let mut times = 0;
    let told = run(RevisionAim::Answers, 64, &mut |ask| {
        // Only the revision judged first and its neighbours answer at random.
        let revision = if (31..=33).contains(&ask.revision) {
            times += 1;
            if times % 2 == 0 { 64 } else { 0 }
        } else {
            ask.revision
        };
        talk.process(ProcessOrder { revision, ..ask })
    });
    // After a single answer such a revision may pass for either end; its neighbours answer more often.
    assert!(
        matches!(told.outcome, RevisionOutcome::Found { revision: 40 } | RevisionOutcome::Unsteady { .. }),
        "{:?}",
        told.outcome
    );
}

#[test]
fn an_end_that_cannot_be_asked_is_told() {
    let mut talk = Talk::new(13);
    talk.place.broken = vec![0];
    let RevisionOutcome::EndFailed { newer: false, .. } = talk.search().outcome else { panic!() };
    let none = run(RevisionAim::Answers, 9, &mut |_| ProcessResult::Visit(BuildVisit::default()));
    let RevisionOutcome::EndFailed { .. } = none.outcome else { panic!("{none:?}") };
}

#[test]
fn differences_that_are_too_near_to_count_are_told_and_ends_that_say_nothing_are_not_alike() {
    let visit = |replies: Vec<BuildReply>| ProcessResult::Visit(BuildVisit { measured: Vec::new(), replies });
    let refused = |question: usize| BuildReply {
        request: format!("text {question}"),
        refused: Some("no (status 500)".to_owned()),
        ..BuildReply::default()
    };
    let mut talk = Talk::new(14);
    (talk.place.last, talk.place.broken) = (9, Vec::new());
    // The build chooses between two almost equally likely words.
    let said = |word: &str, first: f64, second: f64| {
        let token = ReplyToken {
            text: word.to_owned(),
            top: vec![("yes".to_owned(), first), ("no".to_owned(), second)],
        };
        BuildReply {
            request: "text 0".to_owned(),
            text: word.to_owned(),
            tokens: vec![token],
            ..BuildReply::default()
        }
    };
    let near = run(RevisionAim::Answers, 9, &mut |ask| {
        visit(vec![if ask.revision == 9 { said("no", -0.70, -0.69) } else { said("yes", -0.69, -0.70) }])
    });
    assert_eq!(near.outcome, RevisionOutcome::Alike { sure: true });
    assert_eq!(near.differences.len(), 1, "{near:#?}");
    assert!(near.differences[0].distance.unwrap() < 0.05);
    talk.changes = Vec::new();
    assert!(talk.search().differences.is_empty(), "what is the same is no difference");
    let none = run(RevisionAim::Answers, 9, &mut |_| visit((0..ALL).map(refused).collect()));
    let RevisionOutcome::EndFailed { newer: false, why } = none.outcome else { panic!("{none:?}") };
    assert!(why.contains("status 500"), "{why}");
    for (newer, silent) in [(false, 0), (true, 9)] {
        let told = run(RevisionAim::Answers, 9, &mut |ask| {
            if ask.revision == silent { visit(Vec::new()) } else { talk.process(ask) }
        });
        let RevisionOutcome::EndFailed { newer: blamed, .. } = told.outcome else { panic!("{told:?}") };
        assert_eq!(blamed, newer);
    }
}

#[test]
fn a_revision_that_was_not_asked_a_question_that_tells_is_not_healthy_by_the_others() {
    let mut talk = Talk::new(15);
    (talk.place.last, talk.place.broken) = (8, Vec::new());
    // Two revisions change one answer each; the middle revision did not answer the first changed question.
    talk.changes = vec![(3, &[1], 1.5), (6, &[4], 1.5)];
    let told = run(RevisionAim::Answers, 8, &mut |ask| {
        let ProcessResult::Visit(mut visit) = talk.process(ask) else { panic!() };
        visit.replies.retain(|reply| ask.revision != 4 || reply.request != "text 1");
        ProcessResult::Visit(visit)
    });
    let own = told.judged.iter().find(|one| one.revision == 4).unwrap();
    assert!(matches!(&own.standing, RevisionStanding::Unknown { why } if why.contains("text 1")), "{own:?}");
    assert_eq!(told.outcome, found(3), "{told:#?}");
}
