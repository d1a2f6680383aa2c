// Scripts to try, by use. A dialogue is lines, spoken by voices in turn.

export const SAMPLES = {
  narration:
    "The lighthouse had been dark for eleven years when the keeper's granddaughter climbed its stairs, with a lamp, a " +
    "sandwich, and no plan at all. Below her the sea kept up its old conversation with the rocks. She lit the wick, sat " +
    "down, and waited to see who would answer.",
  dialogue: [
    "You said the bridge was just around this corner.",
    "I said a bridge. I never promised it would be on our side of the river.",
    "So we swim?",
    "Or we ask the man with the boat, who has been waving at us for ten minutes.",
  ],
  agent:
    "Thanks for calling Northwind Dental, you are through to the front desk. I have an opening on Thursday at half past " +
    "two, or on Friday morning at nine. Which one suits you better?",
  numbers:
    "On March 3, 2026, order no. 4711 came to $1,249.50, which is 12% less than last year. It weighs 3.5 kg, measures " +
    "40 × 30 cm, and leaves from Dock 7 at 4:45 p.m. Questions? Call (555) 010-2030.",
};
